"""Packages that import a module of theirs only when one of its names is asked for.

Python runs `relaygr/schemas/__init__.py` for each import of a module of the package. With all modules in it, a command
that needs the names of the topics would also import numpy, which takes a tenth of a second or more.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Sequence


def lazy_names(package: str, names: Collection[str], modules: Sequence[str]) -> Callable[[str], object]:
    """The `__getattr__` of a package that exports `names`.

    `modules` are the modules that define them. They are imported in this order until one has the name.
    """

    def get(name: str) -> object:
        if name in names:
            for module in modules:
                found = getattr(importlib.import_module(module), name, None)
                if found is not None:
                    # Python does not ask again.
                    setattr(sys.modules[package], name, found)
                    return found
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    module = sys.modules[package]
    # Completion and `help` list the names before they are imported.
    module.__dir__ = lambda: sorted({*vars(module), *names})  # type: ignore[method-assign]
    return get
