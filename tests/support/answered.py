# SPDX-License-Identifier: Apache-2.0
"""What the program prints for arguments that have one answer: a question that several tests ask is answered once."""

import contextlib
import functools
import io

from ds_hybridep.commands.main import main


@functools.cache
def answered(*arguments: str) -> tuple[int, str, str]:
    """Return exit status, output and errors.  Not for arguments that write files."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main([*arguments])
    return code, out.getvalue(), errors.getvalue()
