# SPDX-License-Identifier: Apache-2.0
"""Where the CUDA toolkit and its programs are."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from torch.utils import cpp_extension

USUAL_CUDA_HOME = Path("/usr/local/cuda")


def cuda_home() -> Path | None:
    """The folder of the toolkit.  torch takes the one above the nvcc that it finds, which may be a wrapper."""
    guess = cpp_extension.CUDA_HOME
    places = [*([Path(guess)] if guess else []), USUAL_CUDA_HOME]
    return next((place for place in places if (place / "include" / "cuda_runtime.h").exists()), None)


def program(name: str) -> Path | None:
    """Where a program is: on PATH, in the toolkit, or beside this Python."""
    home = cuda_home()
    places = [] if home is None else [home / "bin", home / "compute-sanitizer"]
    places += [Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, places)))
    return Path(found) if found else None
