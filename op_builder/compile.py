# SPDX-License-Identifier: Apache-2.0
"""Compiles an extension with torch, and loads it once to see that it can be: `python compile.py < arguments.json`.

It is a process of its own, so that the one that needs the kernels keeps its environment, and maps the library only
where it finally lies.  If something fails, standard output has the reason.
"""

import json
import os
import sys

from torch.utils import cpp_extension


def main() -> int:
    try:
        cpp_extension.load(**json.load(sys.stdin))
    except ValueError as error:
        listed = os.environ.get("TORCH_CUDA_ARCH_LIST")
        sys.stdout.write(f"{error}; TORCH_CUDA_ARCH_LIST is {listed!r}: set it to what torch and nvcc know")
        return 1
    except Exception as error:  # noqa: BLE001 (whatever it is, the other process raises it)
        sys.stdout.write(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
