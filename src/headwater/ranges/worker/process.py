"""The server's side of the bulk worker: starts the process on first use, restarts it after a crash, and sends jobs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Collection
from typing import Protocol, runtime_checkable

import msgspec

from headwater.errors import HeadwaterError, Unavailable
from headwater.ranges.pull import jobs
from headwater.ranges.worker.position_requests import PositionServer

READY = b"ready\n"
START_SECONDS = 30.0
STOP_SECONDS = 5.0
READ_AHEAD = 1 << 20  # bytes of an answer; at most twice that is buffered here for a slow reader
DYING_SECONDS = 1.0
LONGEST = (104 if sys.platform == "darwin" else 108) - len("/positions") - 1  # bytes of the path of the socket folder
COMMAND = (sys.executable, "-P", "-m", "headwater.worker")  # -P: do not import from the server's working directory


class Settings(msgspec.Struct, frozen=True):
    """The settings of a worker, sent as its first line."""

    socket: str
    cache: str
    cache_bytes: int
    positions: str = ""  # the socket on which the server answers requests for positions


class WorkerCounters(msgspec.Struct):
    """Counters for metrics."""

    running: int = 0
    bytes: int = 0
    rows: int = 0
    starts: int = 0
    hits: int = 0
    misses: int = 0
    cache_bytes: int = 0


class WorkerProcess:
    """Starts, restarts and stops the one worker process, and sends jobs to it. Use it in one event loop.

    The process does not inherit the environment variables named in `secrets`.
    """

    def __init__(
        self,
        cache: str,
        cache_bytes: int,
        positions: PositionServer | None = None,
        *,
        secrets: Collection[str] = (),
    ) -> None:
        self._cache, self._cache_bytes, self._secrets = os.path.abspath(cache), cache_bytes, frozenset(secrets)
        self._positions = positions
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: str | None = None
        self._starting = asyncio.Lock()
        self._is_over = False
        self._reported = jobs.CacheCounters()  # the last counters of the running worker
        self.numbers = WorkerCounters()

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None if it does not run."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    async def answer(self, job: jobs.Job) -> Answer:
        """Send `job` and return its answer, to be read frame by frame; Unavailable if no worker can be started."""
        data = jobs.encode_job(job)
        for _ in range(2):  # the second time with a new process: the first may have died unnoticed
            path = await self._running()
            try:
                reader, writer = await asyncio.open_unix_connection(path, limit=READ_AHEAD)
                writer.write(data)
                return Answer(self, reader, writer)
            except OSError:
                await asyncio.to_thread(self._end)
        raise Unavailable("the bulk worker cannot be reached", hint="Retry in a moment.")

    async def is_dead(self) -> bool:
        """Return whether the process has died, after an answer broke off; wait a moment for it to exit."""
        process = self._process
        if process is None:
            return True
        try:
            await asyncio.to_thread(process.wait, DYING_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return True

    async def _running(self) -> str:
        """Return the socket of the worker, which is started if it does not run."""
        async with self._starting:
            if self._is_over:
                raise Unavailable("the server is stopping", hint="Retry in a moment.")
            if self.pid is None:
                await asyncio.to_thread(self._start)
            assert self._folder is not None
            return os.path.join(self._folder, "jobs")

    def _start(self) -> None:
        self._end()
        self._folder = _private_folder()
        positions = os.path.join(self._folder, "positions")
        settings = Settings(os.path.join(self._folder, "jobs"), self._cache, self._cache_bytes, positions)
        environment = {name: value for name, value in os.environ.items() if name not in self._secrets}
        try:
            if self._positions is not None:
                self._positions.open(positions)
            process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            self._process = process
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            process.stdin.flush()
            found = _first_line(process)
        except OSError as error:
            self._end()
            raise Unavailable(f"the bulk worker cannot be started: {error}", hint="Retry in a moment.") from error
        if found != READY:
            self._end()
            raise Unavailable("the bulk worker did not start", hint="See the server's standard error for the cause.")
        self.numbers.starts += 1
        self._reported = jobs.CacheCounters()

    def _end(self) -> None:
        process, self._process = self._process, None
        folder, self._folder = self._folder, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()  # the worker exits at the end of its input
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        if self._positions is not None:
            self._positions.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    async def stop(self) -> None:
        """End the process, and start no other."""
        self._is_over = True
        async with self._starting:
            await asyncio.to_thread(self._end)

    def report(self, done: jobs.CacheCounters) -> None:
        """Add the counters that the worker sent at the end of a job; they start at 0 in each process."""
        numbers, before = self.numbers, self._reported
        numbers.hits += max(done.hits - before.hits, 0)
        numbers.misses += max(done.misses - before.misses, 0)
        numbers.cache_bytes = done.cache_bytes
        self._reported = jobs.CacheCounters(
            max(done.hits, before.hits), max(done.misses, before.misses), done.cache_bytes
        )


@runtime_checkable
class BulkDatabases(Protocol):
    """Databases that can be read in bulk."""

    def place(self, name: str) -> jobs.DatabaseLocation:
        """Return the location of the database `name`; NotFound if there is none. May access files."""

    def open_worker(self) -> WorkerProcess:
        """Return a worker for these databases, not yet started."""


class Answer:
    """The frames of one job. Call `leave` at the end, which ends the job."""

    def __init__(self, process: WorkerProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._process.numbers.running += 1
        self.has_left = False
        self.died = False  # the worker died, or closed this connection

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the pieces of the body; raise the job's error, or Unavailable if the worker died."""
        numbers = self._process.numbers
        while True:
            try:
                kind, rows, length = jobs.HEAD.unpack(await self._reader.readexactly(jobs.HEAD.size))
                data = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, OSError):
                self.died = not self.has_left
                raise Unavailable("the bulk worker died", hint="Retry: the next request starts a new one.") from None
            if kind == jobs.PIECE:
                numbers.rows += rows
                numbers.bytes += length
                yield data
            elif kind == jobs.END:
                self._process.report(msgspec.msgpack.decode(data, type=jobs.CacheCounters))
                return
            elif kind == jobs.FAILURE:
                raise jobs.error_in(msgspec.msgpack.decode(data, type=jobs.Failed))
            else:
                raise HeadwaterError(f"the bulk worker sent a frame of unknown kind {kind}")

    def leave(self) -> None:
        """Stop reading: the worker ends the job."""
        if not self.has_left:
            self.has_left = True
            self._process.numbers.running -= 1
            self._writer.transport.abort()


def _private_folder() -> str:
    """Create a folder of mode 0700, so that other users cannot reach the sockets in it."""
    folder = tempfile.mkdtemp(prefix="headwater-")
    if len(os.fsencode(folder)) > LONGEST:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="headwater-", dir="/tmp")
    return folder


def _first_line(process: subprocess.Popen[bytes]) -> bytes:
    """Return the first line that the process prints; b"" if it exits or takes too long."""
    assert process.stdout is not None
    timer = threading.Timer(START_SECONDS, process.kill)
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()
