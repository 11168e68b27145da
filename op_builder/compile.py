# SPDX-License-Identifier: Apache-2.0
"""Compiles an extension with torch, and loads it once to see that it can be: `python compile.py < arguments.json`.

It is a process of its own, so that the one that needs the kernels keeps its environment, and maps the library only
where it finally lies.  If something fails, standard output has the reason.
"""

import json
import sys

from torch.utils import cpp_extension

try:
    cpp_extension.load(**json.load(sys.stdin))
except Exception as error:  # noqa: BLE001 (whatever it is, the other process raises it)
    sys.stdout.write(str(error))
    sys.exit(1)
