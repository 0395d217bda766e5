"""A process that has imported what other processes need, and is forked for each of them.

A command of Headwater takes a quarter of a second of computing time to start, nearly all of it for imports. A forked
process has its own arguments, environment, folder, files and exit status, and ends as any other.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
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
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

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
            tempfile.TemporaryFile("w+") as given,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as errors,
        ):
            given.write(stdin)
            given.seek(0)
            process = self._fork(program, args, env, cwd, (given.fileno(), out.fileno(), errors.fileno()))
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
            for file in (out, errors):
                file.seek(0)
            return subprocess.CompletedProcess(list(args), code, out.read(), errors.read())

    def start(
        self,
        program: Mapping[str, str],
        args: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        stderr: IO[Any],
    ) -> ForkedProcess:
        """Start a program as `run` does, without input, and return its process; its stdout is a pipe."""
        ours, theirs = os.pipe()
        out = os.fdopen(ours)
        try:
            with open(os.devnull) as nothing:
                return self._fork(program, args, env, cwd, (nothing.fileno(), theirs, stderr.fileno()), out)
        except BaseException:
            out.close()
            raise
        finally:
            os.close(theirs)

    def _fork(
        self,
        program: Mapping[str, str],
        args: Sequence[str | Path],
        env: Mapping[str, str],
        cwd: Path | None,
        files: tuple[int, int, int],
        stdout: IO[str] | None = None,
    ) -> ForkedProcess:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self._address)
            request = {**program, "args": list(args), "env": dict(env), "cwd": cwd or Path.cwd()}
            body = json.dumps(request, default=os.fspath).encode()
            socket.send_fds(connection, [_NUMBER.pack(len(body))], files)
            connection.sendall(body)
            return ForkedProcess(connection, _read_number(connection), list(args), stdout)
        except BaseException:
            connection.close()
            raise


class ForkedProcess:
    """A forked process, with the methods of `subprocess.Popen` that tests use.

    As a child does, it keeps its number until `poll` or `wait` has returned its exit status.
    """

    def __init__(self, connection: socket.socket, pid: int, args: list[str | Path], stdout: IO[str] | None) -> None:
        self._connection, self.pid, self.args, self.stdout = connection, pid, args, stdout
        self.returncode: int | None = None

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.stdout is not None:
            self.stdout.close()
        self.wait()

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, negative for a signal; raise TimeoutExpired as `subprocess` does."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = _read_number(self._connection)
            self._connection.shutdown(socket.SHUT_WR)
            self._connection.recv(1)  # its end: the process is gone
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to a process that runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


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
        for file in files:
            os.close(file)
        connection.sendall(_NUMBER.pack(pid))
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        with contextlib.suppress(OSError):  # the test has given up
            connection.sendall(_NUMBER.pack(code))
            connection.recv(1)  # its end: the test has the status
        os.waitpid(pid, 0)
        os._exit(0)
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    return request


def _run_program(request: dict[str, Any]) -> None:
    """Run the requested program in this process, with its environment, folder and arguments."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    time.tzset()
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
    gc.freeze()  # no collection of a forked process goes through what was imported
    with socket.socket(fileno=int(sys.argv[1])) as _listener:
        _request = _serve(_listener)
    if _request is not None:
        _run_program(_request)
