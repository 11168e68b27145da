# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml cannot say: where the sources of the kernels lie, and how they are built ahead of time.

`pip install .` needs no compiler: the kernels are built on first use.  With DS_BUILD_HYBRIDEP=1 in the environment
they are built ahead of time: for the CPU, and also for CUDA if there are nvcc and a GPU or TORCH_CUDA_ARCH_LIST.  That
needs torch and deepspeed: use `pip install --no-build-isolation .`

The folders op_builder/ and csrc/ lie at the top of the checkout, as DeepSpeed users expect, and are installed as
`ds_hybridep.op_builder` and `ds_hybridep.csrc`.  Never install a top-level `op_builder`: DeepSpeed imports that name
to find out whether it runs from a source checkout of its own.
"""

import importlib.util
import os
import warnings
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


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
    packages=[*find_packages(include=["ds_hybridep", "ds_hybridep.*"]), "ds_hybridep.op_builder", "ds_hybridep.csrc"],
    package_dir={"ds_hybridep.op_builder": "op_builder", "ds_hybridep.csrc": "csrc"},
    **kernels_ahead_of_time(),
)
