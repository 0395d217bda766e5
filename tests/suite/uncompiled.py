"""Modules that are compiled from their Python source, loaded from that source."""

import importlib.util
from pathlib import Path
from types import ModuleType


def is_compiled(module: ModuleType) -> bool:
    """Return whether `module` was loaded from its compiled file."""
    return Path(module.__file__ or "").suffix != ".py"


def uncompiled(module: ModuleType) -> ModuleType:
    """Return `module` as Python runs it where there was no C compiler."""
    name = module.__name__.rpartition(".")[2]
    spec = importlib.util.spec_from_file_location(
        f"{name}_uncompiled", Path(module.__file__ or "").parent / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
