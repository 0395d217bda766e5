"""Compiles the decoder of PostgreSQL's rows into the package, where there is a C compiler. Where there is none, or it
fails, that is said, and the decoder's twin in Python does the work: an installation never fails for want of a compiler.

`HEADWATER_COMPILE=0` leaves it out.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "src/headwater/sources/postgres"
NAME = "rows_compiled"


class CustomBuildHook(BuildHookInterface[Any]):
    """Run for a wheel, and for an editable installation: then what is built lies beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build it, or say why not."""
        folder = Path(self.root) / FOLDER
        for old in [*folder.glob(f"{NAME}.*.so"), *folder.glob(f"{NAME}.*.pyd")]:
            old.unlink()  # it may be of another version
        try:
            if os.environ.get("HEADWATER_COMPILE") == "0":
                raise RuntimeError("HEADWATER_COMPILE=0")
            built = compile_into(folder)
        except (Exception, SystemExit) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self.app.display_warning(f"headwater: rows of PostgreSQL are decoded in Python, not compiled ({reason})")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"].append(f"{FOLDER}/{built.name}")


def compile_into(folder: Path) -> Path:
    """The module, built in `folder`."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    with tempfile.TemporaryDirectory() as place:
        module = Extension(NAME, [str(folder / f"{NAME}.pyx")], extra_compile_args=[] if os.name == "nt" else ["-O2"])
        made = cythonize([module], build_dir=place, quiet=True)
        command = Distribution({"ext_modules": made}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(folder), place
        command.ensure_finalized()
        command.run()
        return Path(command.get_ext_fullpath(NAME))
