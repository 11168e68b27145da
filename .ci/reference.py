# SPDX-License-Identifier: Apache-2.0
"""Builds the reference of the Python interface, from the docstrings of the public names.

    make reference     # then open build/reference/index.html

A warning is an error, and so is a public name whose docstring leaves out an argument or its errors.
"""

import importlib
import inspect
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

MODULES = ("ds_hybridep", "ds_hybridep.errors")


def main(folder: Path) -> int:
    modules = {name: importlib.import_module(name) for name in MODULES}
    modules["ds_hybridep"].__dict__.update(public_names(modules["ds_hybridep"]))  # made on first use; pdoc looks here
    missing = gaps(modules["ds_hybridep"])
    if missing:
        print("\n".join(missing), file=sys.stderr)
        return 1
    import pdoc

    pdoc.render.configure(docformat="google", footer_text=f"ds_hybridep {modules['ds_hybridep'].__version__}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc(*MODULES, r"!ds_hybridep\.(?!errors$)", output_directory=folder)
    print(f"{folder / 'index.html'}: {', '.join(MODULES)}")
    return 0


def public_names(module: ModuleType) -> dict[str, object]:
    return {name: getattr(module, name) for name in module.__all__}


def gaps(module: ModuleType) -> list[str]:
    """Return what docstrings of public functions and classes do not say."""
    found = []
    for name, value in public_names(module).items():
        if not callable(value):
            continue
        text = inspect.getdoc(value) or ""
        if not text:
            found.append(f"{name}: no docstring")
        elif inspect.isclass(value) and hasattr(value, "__dataclass_fields__"):
            continue  # its fields have docstrings of their own
        else:
            found += [
                f"{name}: {parameter} is not explained"
                for parameter in inspect.signature(value).parameters
                if not re.search(rf"^ *(\w+, )*{parameter}(, \w+)*: ", text, re.MULTILINE)
            ]
            found += [] if re.search(r"^Raises:$", text, re.MULTILINE) else [f"{name}: its errors are not explained"]
    return found


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/reference")))
