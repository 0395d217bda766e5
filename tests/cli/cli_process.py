"""The real command line in separate processes: run to the end, or served until the test is over."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.suite.deadlines import PATIENCE
from tests.suite.fork_server import ForkedProcess, fork_server
from tests.suite.server_launch import start_server

HEADWATER = [sys.executable, "-m", "headwater"]
TIMEOUT = PATIENCE
REAL = {"demo", "pipeline", "serve"}
LOADED = (
    "headwater.cli.main",
    "headwater.cli.feed",
    "headwater.cli.doctor_checks",
    "headwater.settings",
    "asyncio",
    "ssl",
)
_ran: set[str] = set()  # commands that this process has started in interpreters of their own


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWATER_", "SKEINDB_"))}
    return kept | extra


def run(
    *args: str, env: Mapping[str, str] = {}, cwd: Path | None = None, stdin: str = "", timeout: float = TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end: the first of each name in a new interpreter, others forked.

    `REAL` ones start processes and servers themselves.
    """
    command, told = args[0] if args else "", environment(**env)
    if command in _ran and command not in REAL and not any(name.startswith("PYTHON") for name in env):
        server = fork_server(*LOADED)
        return server.run({"module": "headwater"}, args, env=told, cwd=cwd, stdin=stdin, timeout=timeout)
    _ran.add(command)
    return subprocess.run(
        [*HEADWATER, *args],
        env=told,
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_json(*args: str, **kwargs: Any) -> Any:
    """Return the document that a command prints; fail if it fails or prints an error."""
    done = run(*args, "-o", "json", **kwargs)
    assert (done.returncode, done.stderr) == (0, ""), done
    return json.loads(done.stdout)


def refused(exit_code: int, *args: str, **kwargs: Any) -> str:
    """Return the stderr of a command that must fail: an error line, maybe a hint, never a traceback."""
    done = run(*args, **kwargs)
    assert done.returncode == exit_code, done
    lines = done.stderr.splitlines()
    assert lines and lines[0].startswith("error: "), done.stderr
    assert all(line.startswith("hint: ") for line in lines[1:]), done.stderr
    assert done.stdout == ""
    return done.stderr


class Served:
    """A running server: its process, its URL and the line that it announced."""

    def __init__(self, process: subprocess.Popen[str] | ForkedProcess, announced: str, errors: Path) -> None:
        self.process, self.announced, self.errors = process, announced, errors
        self.url = announced.split()[3]
        self.grpc = announced.split()[5]  # the address of the other port

    def sql(self, statement: str, *args: str, **kwargs: Any) -> Any:
        return run_json("sql", "--server", self.url, statement, *args, **kwargs)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT)


@contextlib.contextmanager
def served(folder: Path, *args: str, env: Mapping[str, str] = {}, forked: bool = True) -> Iterator[Served]:
    """Run `headwater serve` on a free port with `folder`/data until the block ends.

    `forked` as for `start_server`; variables other than Headwater's need an interpreter of their own.
    """
    errors = folder / "server.err"
    arguments = [*args, "--data", str(folder / "data"), "--http", "127.0.0.1:0"]
    is_plain = all(name.startswith(("HEADWATER_", "SKEINDB_")) for name in env)
    with (
        errors.open("a") as stderr,
        start_server(
            arguments, env=environment(**env), cwd=folder, stderr=stderr, forked=forked and is_plain
        ) as process,
    ):
        assert process.stdout is not None
        announced = process.stdout.readline()
        assert announced.startswith("headwater ready at http://"), errors.read_text()
        try:
            yield Served(process, announced, errors)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(TIMEOUT)


def script(file: Path, sql: str) -> None:
    """Run `sql` with the standard library's sqlite3 in another process, as any program would."""
    code = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); db.executescript(sys.argv[2]); db.close()"
    subprocess.run([sys.executable, "-c", code, str(file), sql], check=True, timeout=TIMEOUT)


def query(file: Path, sql: str) -> list[list[Any]]:
    """Return the rows of `sql`, read by another process."""
    code = (
        "import json, sqlite3, sys; db = sqlite3.connect(sys.argv[1]); "
        "print(json.dumps(db.execute(sys.argv[2]).fetchall())); db.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file), sql], check=True, timeout=TIMEOUT, capture_output=True, text=True
    )
    found: list[list[Any]] = json.loads(done.stdout)
    return found
