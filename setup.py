# SPDX-License-Identifier: Apache-2.0
"""Packages ds_hybridep.  `pip install .` needs no compiler: the kernels are built on first use.

With DS_BUILD_HYBRIDEP=1 in the environment they are built ahead of time: for the CPU, and also for CUDA if there are
nvcc and a GPU or TORCH_CUDA_ARCH_LIST.  That needs torch and deepspeed: use `pip install --no-build-isolation .`

The folders op_builder/ and csrc/ lie at the top of the checkout, as DeepSpeed users expect, and are installed as
`ds_hybridep.op_builder` and `ds_hybridep.csrc`.  Never install a top-level `op_builder`: DeepSpeed imports that name
to find out whether it runs from a source checkout of its own.
"""

import importlib.util
import os
import re
import warnings
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
SOURCE_FILES = ["**/*.cpp", "**/*.h", "**/*.cu", "**/*.md"]


def read_version() -> str:
    """The version, read as text: importing the package could need packages that are not installed yet."""
    text = (ROOT / "ds_hybridep" / "version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError('ds_hybridep/version.py has no line of the form __version__ = "1.2.3"')
    return match.group(1)


def kernels_ahead_of_time() -> dict[str, object]:
    """Arguments of setup() that build the kernels; empty unless DS_BUILD_HYBRIDEP asks for them."""
    if os.environ.get("DS_BUILD_HYBRIDEP", "0") != "1":
        return {}
    spec = importlib.util.spec_from_file_location("hybridep_builder", ROOT / "op_builder" / "hybridep.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from torch.utils.cpp_extension import BuildExtension

    extensions = [module.HybridEPBuilder("cpu").builder()]
    cuda = module.HybridEPBuilder("cuda")
    reason = cuda.why_not(ahead_of_time=True)
    if reason is None:
        extensions.append(cuda.builder())
        os.environ.update(cuda.environment())
    else:
        warnings.warn(f"ds_hybridep: kernels for the CPU only: {reason}", stacklevel=1)
    for extension in extensions:  # setuptools takes relative paths only
        extension.sources = [os.path.relpath(source, ROOT) for source in extension.sources]
    return {"ext_modules": extensions, "cmdclass": {"build_ext": BuildExtension}}


setup(
    name="ds_hybridep",
    version=read_version(),
    description="Mixture-of-Experts training with DeepSpeed over slow links: "
    "experts travel where that is cheaper than tokens",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords="deepspeed mixture-of-experts expert-parallelism distributed-training pytorch",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
    python_requires=">=3.10",
    packages=[*find_packages(include=["ds_hybridep", "ds_hybridep.*"]), "ds_hybridep.op_builder", "ds_hybridep.csrc"],
    package_dir={"ds_hybridep.op_builder": "op_builder", "ds_hybridep.csrc": "csrc"},
    package_data={
        "ds_hybridep": ["py.typed", "commands/*.html", "lab/*.cpp", "plan/models/*.yaml"],
        "ds_hybridep.op_builder": SOURCE_FILES,
        "ds_hybridep.csrc": SOURCE_FILES,
    },
    include_package_data=False,
    zip_safe=False,
    install_requires=[
        # torch 2.5 is the first to call entry points of the group torch.backends.  They make a config enough.
        "torch>=2.5",
        # docs/versions.md lists the versions that were tried.  `attach` reports a newer one, and refuses it if it
        # lacks something that `attach` changes.
        "deepspeed>=0.19.4",
        "psutil",
        "numpy",
        "pydantic>=2.5",
        "pyyaml",
        "jinja2",
        "rich",
        "pybind11",
        "ninja",
    ],
    extras_require={
        "dev": [
            "pytest<9.2",  # pytest-xdist 3.8 does not see groups of tests in 9.2
            "pytest-timeout",
            "pytest-xdist",
            "build",
            "hypothesis",
            "ruff",
            "mypy",
            "import-linter",
            "types-PyYAML",
            "pre-commit",
            "protobuf",
        ],
        # DeepSpeed 0.19.8 cannot load models of newer transformers for expert parallelism.
        "hf": ["transformers==5.3.0", "peft==0.21.2", "accelerate==1.15.0"],
        "plot": ["matplotlib"],
    },
    entry_points={
        "torch.backends": ["ds_hybridep = ds_hybridep._autoload:install"],
        "console_scripts": ["ds_hybridep = ds_hybridep.commands.main:main"],
    },
    **kernels_ahead_of_time(),
)
