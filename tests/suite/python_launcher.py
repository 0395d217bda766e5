"""A replacement for the interpreter that Spark starts: chosen modules run in a process forked from a loaded one.

Spark starts a new interpreter for the source of every stream: half a second of computing time, nearly all of it for
imports. All other programs run in an interpreter of their own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.suite.fork_server import fork, fork_server

ROOT = Path(__file__).parent.parent.parent
_SCRIPT = """#!{python} -SE
import sys
sys.path.append({root!r})
from tests.suite.python_launcher import launch
launch({address!r}, {modules!r})
"""


def write_launcher(path: Path, modules: tuple[str, ...], *, loaded: tuple[str, ...]) -> Path:
    """Write a program that runs `modules` in processes forked from one that has imported `loaded`; return `path`."""
    address = fork_server(*loaded).address
    path.write_text(_SCRIPT.format(python=sys.executable, root=str(ROOT), address=address, modules=modules))
    path.chmod(0o755)
    return path


def launch(address: str, modules: tuple[str, ...]) -> None:
    """Run this process's arguments, `-m MODULE …` or others, as Python would; end with its exit status."""
    args = sys.argv[1:]
    if len(args) < 2 or args[0] != "-m" or args[1] not in modules:
        os.execv(sys.executable, [sys.executable, *args])
    code = fork(address, {"module": args[1]}, args[2:], env=os.environ).wait()
    sys.exit(code if code >= 0 else 128 - code)
