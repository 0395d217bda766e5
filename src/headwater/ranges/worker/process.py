"""The server's side of the bulk worker: starts the process when it is first needed, and again when it died."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from typing import Protocol, runtime_checkable

import msgspec

from headwater.errors import HeadwaterError, Unavailable
from headwater.ranges.pull.jobs import (
    END,
    FAILURE,
    HEAD,
    PIECE,
    Done,
    Job,
    Place,
    decode_end,
    decode_failure,
    encode_job,
)
from headwater.ranges.worker.position_requests import Desk

READY = b"ready\n"
START_SECONDS = 30.0
STOP_SECONDS = 5.0
READ_AHEAD = 1 << 20  # bytes of an answer; twice that stands here at most when its reader is slow
DYING_SECONDS = 1.0
SECRETS = ("HEADWATER_TOKEN", "SKEINDB_TOKEN", "HEADWATER_JWT_SECRET", "HEADWATER_KEY_PEPPER")  # of no use there
LONGEST = (104 if sys.platform == "darwin" else 108) - len("/questions") - 1  # bytes of a folder with sockets in it
COMMAND = (sys.executable, "-P", "-m", "headwater.worker")  # -P: nothing is imported from where the server was started


class Settings(msgspec.Struct, frozen=True):
    """The first line a worker is told."""

    socket: str
    cache: str
    cache_bytes: int
    questions: str = ""  # where the server answers


class Numbers(msgspec.Struct):
    """What was done, for metrics."""

    running: int = 0
    bytes: int = 0
    rows: int = 0
    starts: int = 0
    hits: int = 0
    misses: int = 0
    cache_bytes: int = 0


class WorkerProcess:
    """One worker at a time. Used in one loop."""

    def __init__(self, cache: str, cache_bytes: int, desk: Desk | None = None) -> None:
        self._cache, self._cache_bytes = os.path.abspath(cache), cache_bytes
        self._desk = desk
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: str | None = None
        self._starting = asyncio.Lock()
        self._is_over = False
        self._told = Done()  # by the worker that runs
        self.numbers = Numbers()

    @property
    def pid(self) -> int | None:
        """Of the process, while it runs."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    async def answer(self, job: Job) -> Answer:
        """Send `job`; its frames are read from the answer. Unavailable when there is no worker to be had."""
        data = encode_job(job)
        for _ in range(2):  # the second time with a new process: the first may have died unseen
            path = await self._running()
            try:
                reader, writer = await asyncio.open_unix_connection(path, limit=READ_AHEAD)
                writer.write(data)
                return Answer(self, reader, writer)
            except OSError:
                await asyncio.to_thread(self._end)
        raise Unavailable("the bulk worker cannot be reached", hint="Try again in a moment.")

    async def is_dead(self) -> bool:
        """After an answer that died: whether the process is on its way out. It takes a moment to be seen."""
        process = self._process
        if process is None:
            return True
        try:
            await asyncio.to_thread(process.wait, DYING_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return True

    async def _running(self) -> str:
        """Where a worker listens; it is started if there is none."""
        async with self._starting:
            if self._is_over:
                raise Unavailable("the server is stopping", hint="Try again in a moment.")
            if self.pid is None:
                await asyncio.to_thread(self._start)
            assert self._folder is not None
            return os.path.join(self._folder, "jobs")

    def _start(self) -> None:
        self._end()
        self._folder = _private_folder()
        questions = os.path.join(self._folder, "questions")
        settings = Settings(os.path.join(self._folder, "jobs"), self._cache, self._cache_bytes, questions)
        environment = {name: value for name, value in os.environ.items() if name not in SECRETS}
        try:
            if self._desk is not None:
                self._desk.open(questions)
            process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            self._process = process
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            process.stdin.flush()
            found = _first_line(process)
        except OSError as error:
            self._end()
            raise Unavailable(f"the bulk worker cannot be started: {error}", hint="Try again in a moment.") from error
        if found != READY:
            self._end()
            raise Unavailable("the bulk worker did not start", hint="The server's standard error says why.")
        self.numbers.starts += 1
        self._told = Done()

    def _end(self) -> None:
        process, self._process = self._process, None
        folder, self._folder = self._folder, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()  # it ends by itself
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        if self._desk is not None:
            self._desk.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    async def stop(self) -> None:
        """End the process; nothing is started any more."""
        self._is_over = True
        async with self._starting:
            await asyncio.to_thread(self._end)

    def told(self, done: Done) -> None:
        """A job ended; what the worker counts begins anew with each process."""
        numbers, before = self.numbers, self._told
        numbers.hits += max(done.hits - before.hits, 0)
        numbers.misses += max(done.misses - before.misses, 0)
        numbers.cache_bytes = done.cache_bytes
        self._told = Done(max(done.hits, before.hits), max(done.misses, before.misses), done.cache_bytes)


@runtime_checkable
class Bulk(Protocol):
    """Databases that can be read in bulk."""

    def place(self, name: str) -> Place:
        """Where the database `name` is; NotFound. It may look at files."""
        ...

    def open_worker(self) -> WorkerProcess:
        """A worker for them, not yet started."""
        ...


class Answer:
    """The frames of one job. Leave it: that ends the job."""

    def __init__(self, process: WorkerProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._process.numbers.running += 1
        self.has_left = False
        self.died = False  # the worker did, or at least its end of this

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, piece by piece, to its end; raises the job's error, or Unavailable when the worker died."""
        numbers = self._process.numbers
        while True:
            try:
                kind, rows, length = HEAD.unpack(await self._reader.readexactly(HEAD.size))
                data = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, OSError):
                self.died = not self.has_left
                raise Unavailable("the bulk worker died", hint="Try again: it is started anew.") from None
            if kind == PIECE:
                numbers.rows += rows
                numbers.bytes += length
                yield data
            elif kind == END:
                self._process.told(decode_end(data))
                return
            elif kind == FAILURE:
                raise decode_failure(data)
            else:
                raise HeadwaterError("the bulk worker said something unknown")

    def leave(self) -> None:
        """Read no more: the worker ends the job."""
        if not self.has_left:
            self.has_left = True
            self._process.numbers.running -= 1
            self._writer.transport.abort()


def _private_folder() -> str:
    """Of mode 0700: nobody else finds the sockets in it."""
    folder = tempfile.mkdtemp(prefix="headwater-")
    if len(os.fsencode(folder)) > LONGEST:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="headwater-", dir="/tmp")
    return folder


def _first_line(process: subprocess.Popen[bytes]) -> bytes:
    """The first line it says; b"" if it ends or takes too long."""
    assert process.stdout is not None
    timer = threading.Timer(START_SECONDS, process.kill)
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()
