"""A process that has imported what other processes need, and is forked for each of them.

A command of Headwater takes a quarter of a second of computing time to start, nearly all of it for imports. A forked
process has its own arguments, environment, folder, files and exit status, and ends as any other.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_NUMBER = struct.Struct("!i")


# The tests' side


class ForkServer:
    """Run Python programs in processes forked from one that has imported `modules`."""

    def __init__(self, *modules: str) -> None:
        self._address = f"\0headwater-tests-{os.getpid()}-{id(self)}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen(16)
            number = listener.fileno()
            command = [sys.executable, "-P", __file__, str(number), *modules]
            # It ends when its stdin does: at our end at the latest.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[number]
            )

    def stop(self) -> None:
        """End the server. Programs that still run go on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(
        self,
        program: Mapping[str, str],
        args: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        stdin: str = "",
        timeout: float,
    ) -> subprocess.CompletedProcess[str]:
        """Run `{"module": name}` or `{"code": text}` to its end, as `python -m` and `python -c` do."""
        with (
            socket.socket(socket.AF_UNIX) as asked,
            tempfile.TemporaryFile("w+") as given,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as errors,
        ):
            given.write(stdin)
            given.seek(0)
            asked.connect(self._address)
            request = {**program, "args": list(args), "env": dict(env), "cwd": cwd or Path.cwd()}
            body = json.dumps(request, default=os.fspath).encode()
            socket.send_fds(asked, [_NUMBER.pack(len(body))], [file.fileno() for file in (given, out, errors)])
            asked.sendall(body)
            pid = _read_number(asked)
            asked.settimeout(timeout)
            try:
                status = _read_number(asked)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(list(args), timeout) from None
            for file in (out, errors):
                file.seek(0)
            code = os.waitstatus_to_exitcode(status)
            return subprocess.CompletedProcess(list(args), code, out.read(), errors.read())


@functools.cache
def fork_server(*modules: str) -> ForkServer:
    """Return the server of this process that has imported `modules`."""
    made = ForkServer(*modules)
    atexit.register(made.stop)
    return made


def _read_number(connection: socket.socket) -> int:
    found: int = _NUMBER.unpack(_read(connection, _NUMBER.size))[0]
    return found


def _read(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        piece = connection.recv(count - len(found))
        if not piece:
            raise EOFError("the fork server has ended")
        found += piece
    return found


# The server's side


def _serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Return the request in the new process, and nothing in the server at its end."""
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            return None
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _handle(connection)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _handle(connection: socket.socket) -> dict[str, Any]:
    """Fork once more, and report the exit status of the second process; return the request in that one."""
    first, files, _, _ = socket.recv_fds(connection, _NUMBER.size, 3)
    request: dict[str, Any] = json.loads(_read(connection, _NUMBER.unpack(first)[0]))
    pid = os.fork()
    if pid:
        connection.sendall(_NUMBER.pack(pid))
        with contextlib.suppress(BrokenPipeError):  # the test has given up
            connection.sendall(_NUMBER.pack(os.waitpid(pid, 0)[1]))
        os._exit(0)
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    return request


def _become(request: dict[str, Any]) -> None:
    """Go on as the program that was asked for."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    random.seed()
    tempfile.tempdir = None  # it was chosen by another environment
    sys.path.insert(0, request["cwd"])
    if "module" in request:
        sys.argv = [request["module"], *request["args"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *request["args"]]
        exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    for _name in sys.argv[2:]:
        importlib.import_module(_name)
    with socket.socket(fileno=int(sys.argv[1])) as _listener:
        _request = _serve(_listener)
    if _request is not None:
        _become(_request)
