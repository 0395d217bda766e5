"""A small file system that a test can fill; the plain folder if mounting is not allowed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

SIZE = "512m"


class SmallDisk:
    """Mounts a small tmpfs at `folder` until `close`; `is_real` is False if mounting is not allowed."""

    def __init__(self, folder: Path, size: str = SIZE) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        self.is_real = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0

    def fill(self) -> None:
        """Use up all space; `free` releases it."""
        with contextlib.suppress(OSError), (self.folder / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass

    def free(self) -> None:
        (self.folder / "ballast").unlink(missing_ok=True)

    def close(self, keep: Path | None = None) -> None:
        """Unmount it, after copying its files to `keep`."""
        if not self.is_real:
            return
        self.is_real = False
        if keep is not None:
            shutil.copytree(self.folder, keep)
        subprocess.run(["umount", str(self.folder)], check=True)
