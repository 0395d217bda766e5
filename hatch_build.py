"""Compiles what is hot into the package, where there is a C compiler. Where there is none, or it fails, that is said,
and Python does the same work: an installation never fails for want of a compiler.

`HEADWATER_COMPILE=0` leaves it out.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# A .py is also what Python runs without a compiler. A .pyx has a twin in Python instead. One source for both was tried
# there. Compiled it took 1.4 times as long for rows, 2.3 times for Debezium, 13 times for tables; uncompiled 1.6 times
# for rows and Debezium. The receiver of PostgreSQL's stream runs without the interpreter lock: Python has no such form.
MODULES = {  # and who does without
    "feeds/formats/debezium_compiled.pyx": "Debezium's envelope is written in Python",
    "log/disk/block_columns.py": "changes are laid out for the log in Python",
    "sources/postgres/capture/decode/row_decoder_compiled.pyx": "rows of PostgreSQL are decoded in Python",
    "sources/postgres/capture/stream/receiver_compiled.pyx": "PostgreSQL's stream is received in Python",
    "sources/postgres/read/text_cells_compiled.pyx": "PostgreSQL's tables are taken cell by cell in Python",
}


class CustomBuildHook(BuildHookInterface[Any]):
    """Run for a wheel, and for an editable installation: then what is built lies beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build them, or say why not."""
        for module, without in MODULES.items():
            source = Path(self.root) / "src" / "headwater" / module
            for old in [*source.parent.glob(f"{source.stem}.*.so"), *source.parent.glob(f"{source.stem}.*.pyd")]:
                old.unlink()  # it may be of another version
            try:
                if os.environ.get("HEADWATER_COMPILE") == "0":
                    raise RuntimeError("HEADWATER_COMPILE=0")
                built = compiled(source)
            except (Exception, SystemExit) as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                self.app.display_warning(f"headwater: {without}, not compiled ({reason})")
                continue
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            build_data["artifacts"].append(built.relative_to(self.root).as_posix())


def compiled(source: Path) -> Path:
    """The module, built beside its source."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    with tempfile.TemporaryDirectory() as place:
        module = Extension(source.stem, [str(source)], extra_compile_args=[] if os.name == "nt" else ["-O2"])
        made = cythonize([module], build_dir=place, quiet=True)
        command = Distribution({"ext_modules": made}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(source.parent), place
        command.ensure_finalized()
        command.run()
        return Path(command.get_ext_fullpath(source.stem))
