# SPDX-License-Identifier: Apache-2.0
"""Runs the tests marked `core` with each Python, DeepSpeed and transformers: `make test-versions`.

A Python that is not installed is left out.  TORCH is what to tell pip of torch: one
with CUDA takes gigabytes for each.
"""

import os
import shlex

import nox

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
DEEPSPEED = ("0.19.4", "0.19.5", "0.19.6", "0.19.7", "0.19.8")
TRANSFORMERS = ("5.3.0", "5.22.2", "5.24.0")  # the first is that of the extra "hf"
PAIRS = (*((one, TRANSFORMERS[0]) for one in DEEPSPEED), *((DEEPSPEED[-1], one) for one in TRANSFORMERS[1:]))
# Older versions of DeepSpeed use what newer versions of torch deprecate.
TESTS = "python -m pytest -m core -W ignore::DeprecationWarning -W ignore::FutureWarning"

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False


@nox.session(python=PYTHONS, reuse_venv=True)
def core(session: nox.Session) -> None:
    session.install(*shlex.split(os.environ.get("TORCH", "torch==2.13.0")))
    session.install("--editable", ".[dev,hf]")
    failed = []
    for deepspeed, transformers in PAIRS:
        pair = f"DeepSpeed {deepspeed}, transformers {transformers}"
        # pip warns of versions that pyproject.toml does not allow, and installs them.
        session.install(f"deepspeed=={deepspeed}", f"transformers=={transformers}")
        # One folder for each: DeepSpeed loads what it finds there, also where another version built it.
        built = os.path.join(session.create_tmp(), f"{deepspeed}-{transformers}")
        result = session.run(
            *TESTS.split(), env={"TORCH_EXTENSIONS_DIR": built}, success_codes=range(256), silent=True
        )
        last = str(result).strip().splitlines()[-1]
        session.log(f"{pair}: {last}")
        if "failed" in last or "error" in last or "passed" not in last:
            session.log(str(result))
            failed.append(pair)
    if failed:
        session.error(f"failed: {'; '.join(failed)}")
