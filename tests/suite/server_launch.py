"""The start of `headwater serve`, forked from a process that has imported its modules."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.suite.fork_server import ForkedProcess, fork_server

LOADED = (
    "headwater.cli.main",
    "headwater.app",
    "headwater.serve.api",
    "headwater.serve.grpc.server",
    "headwater.serve.server.server",
    "headwater.settings",
    "headwater.sources.postgres.source",
    "headwater.sources.sqlite.source",
    "uvloop",
)
_is_started = False  # whether this process has started a server in an interpreter of its own


def start_server(
    args: Sequence[str],
    *,
    env: Mapping[str, str],
    stderr: IO[Any],
    cwd: Path | None = None,
    forked: bool = True,
) -> subprocess.Popen[str] | ForkedProcess:
    """Start `headwater serve`, its stdout a pipe; the first of this process in an interpreter of its own.

    Imports take most of a start. `forked` is for tests that do not depend on the interpreter, its arguments and memory.
    """
    global _is_started
    if forked and _is_started:
        return fork_server(*LOADED).start({"module": "headwater"}, ["serve", *args], env=env, cwd=cwd, stderr=stderr)
    _is_started = True
    command = [sys.executable, "-m", "headwater", "serve", *args]
    return subprocess.Popen(command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=stderr, text=True)
