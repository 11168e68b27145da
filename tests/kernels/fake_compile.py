# SPDX-License-Identifier: Apache-2.0
"""In the place of op_builder/compile.py: makes an empty module in a moment, and notes that it was called.

FAKE_LOG: a file to which each call adds a line.  FAKE_ERROR: what it says if it is to fail.
"""

import json
import os
import subprocess
import sys
import sysconfig

MODULE = """
#include <Python.h>
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "NAME", 0, -1, 0};
PyMODINIT_FUNC PyInit_NAME(void) { return PyModule_Create(&definition); }
"""


def main() -> None:
    arguments = json.load(sys.stdin)
    call = {"environment": dict(os.environ), "arguments": arguments}
    with open(os.environ["FAKE_LOG"], "a") as log:
        log.write(json.dumps(call) + "\n")
    if error := os.environ.get("FAKE_ERROR"):
        sys.stdout.write(error)
        sys.exit(1)
    library = os.path.join(arguments["build_directory"], f"{arguments['name']}.so")
    command = ["cc", "-shared", "-fPIC", f"-I{sysconfig.get_paths()['include']}", "-x", "c", "-", "-o", library]
    subprocess.run(command, input=MODULE.replace("NAME", arguments["name"]), text=True, check=True, timeout=500)


if __name__ == "__main__":
    main()
