"""The checks of `headwater doctor`: the machine, and each database with its log."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from headwater.config import Config
from headwater.errors import HeadwaterError
from headwater.log.disk.disk_log import DiskLog
from headwater.sources import registry
from headwater.sources.registry import Check, Inspection

LITTLE_SPACE, NO_SPACE = 1 << 30, 64 << 20  # bytes: warn, fail


def machine(data: Path) -> Iterator[Check]:
    """Yield the checks of the interpreter, its database libraries, and the data folder."""
    yield Check("python", "ok", sys.version.split()[0])
    for name in registry.KINDS:
        if version := registry.kind(name).library_version():
            yield Check(name, "ok", version)
    yield _folder(data)
    yield _space(data)


def _folder(data: Path) -> Check:
    if data.exists() and not data.is_dir():
        return Check("data", "fail", f"{data} is not a folder", "Name another folder with --data.")
    if not data.exists():
        return Check("data", "ok", f"{data} is not there yet; `headwater serve` creates it")
    if not os.access(data, os.W_OK | os.X_OK):
        return Check("data", "fail", f"{data} cannot be written", f"chown or chmod u+rwx {data}")
    return Check("data", "ok", str(data))


def _space(data: Path) -> Check:
    there = next(folder for folder in (data, *data.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    finding = f"{free / 1e9:.1f} GB free"
    if free < NO_SPACE:
        return Check("disk", "fail", finding, "Free space: writes are refused on a full disk.")
    if free < LITTLE_SPACE:
        return Check("disk", "warn", finding, "Free space, or lower log.retention_bytes.")
    return Check("disk", "ok", finding)


def database(name: str, url: str, log: Path, config: Config) -> Iterator[Check]:
    """Yield the checks of one database and its log."""
    kind = registry.kind_name(url)
    found = registry.kind(kind).inspect(name, url, config.sources[kind])
    yield from found.checks
    if found.is_readable:
        try:
            yield from _log(name, log, found)
        except HeadwaterError as error:
            yield Check(name, "fail", error.message, error.hint)


def _log(name: str, path: Path, found: Inspection) -> Iterator[Check]:
    again = "Readers take a new snapshot after the next start, which begins a new generation."
    if not path.exists():
        if found.is_captured:
            yield Check(name, "warn", f"its log {path} is missing", f"Check --data and the name. {again}")
        return
    with closing(DiskLog.open(path, read_only=True)) as log:
        holds = "no changes" if log.latest < log.horizon else f"offsets {log.horizon} to {log.latest}"
        yield Check(name, "ok", f"log {path}: {holds}, generation {log.generation}")
        if mismatch := found.mismatch(log):
            reason, question = mismatch
            yield Check(name, "warn", reason, f"{question} {again}".strip())
