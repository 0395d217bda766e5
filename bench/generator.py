"""The load generator of `bench/load`: built with the system's C compiler, one process per run; returns its figures."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

SOURCES = Path(__file__).parent / "load"
MARK = "@hw" + "0" * 24  # stamped with time and number when it is published


class Missing(Exception):
    """A program that the benchmark needs is not installed; the text says how to install it."""


@dataclass(frozen=True)
class Shot:
    """One publication in alternating forms, and the number of answers that the server sends to it."""

    forms: tuple[bytes, ...]
    answers: int


class Side(Protocol):
    """One server under load: its port, the processes whose CPU counts, and its requests."""

    port: int
    pids: list[int]

    def subscribers(self, transport: str, count: int) -> list[bytes]: ...

    def shot(self, width: int) -> Shot: ...


@dataclass(frozen=True)
class Run:
    """The figures of one run; CPU in seconds of all threads of the server, and of the generator."""

    seconds: float
    shots: int
    published: int
    deliveries: int
    server_s: float
    client_s: float
    idle_share: float
    p50_us: int
    p99_us: int
    late: int
    disordered: int
    beyond: int
    kib: int
    reading_kib: int = 0
    stalled_kib: int = 0
    resumed_kib: int = 0
    missed: int = 0
    catch_up_s: float = 0.0


class Generator:
    """The generator program, built in its own folder."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if not compiler:
            raise Missing("no C compiler (apt-get install gcc libc6-dev)")
        self._folder, self._files = folder, 0
        self._program = folder / "load"
        sources = sorted(str(path) for path in SOURCES.glob("*.c"))
        command = [compiler, "-std=gnu11", "-D_GNU_SOURCE", "-O2", "-o", str(self._program), *sources]
        subprocess.run(command, check=True)

    def run(
        self, side: Side, subscribers: Sequence[bytes], shot: Shot, *, publishers: int = 1, **options: float
    ) -> Run:
        """Return the figures of one run; raise RuntimeError if deliveries are repeated or, with one publisher,
        disordered.
        """
        found = figures(self.start(side, subscribers, shot, publishers=publishers, **options))
        if found.beyond or (publishers == 1 and found.disordered):
            raise RuntimeError(f"deliveries were repeated or out of order: {found}")
        return found

    def start(
        self, side: Side, subscribers: Sequence[bytes], shot: Shot | None, **options: float
    ) -> subprocess.Popen[str]:
        """Start a run; the caller reads its figures with `figures`."""
        command = [str(self._program), "--port", str(side.port), "--pids", ",".join(map(str, side.pids))]
        command += ["--subscribers", self._file("subscribers", subscribers)]
        if shot:
            command += ["--shots", self._file("shots", shot.forms), "--answers", str(shot.answers)]
        for name, value in options.items():
            command += ["--" + name.replace("_", "-"), f"{value:g}"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def _file(self, name: str, requests: Sequence[bytes]) -> str:
        self._files += 1
        path = self._folder / f"{name}.{self._files}"
        path.write_bytes(b"".join(b"%d\n%s" % (len(each), each) for each in requests))
        return str(path)


def figures(program: subprocess.Popen[str]) -> Run:
    """Wait for the end of a run and return its figures."""
    answer = program.communicate()[0]
    if not answer:
        raise RuntimeError("the run failed; its reason is above")
    return Run(**json.loads(answer))


def http_get(port: int, path: str, **headers: str) -> bytes:
    """Return a GET request as bytes."""
    lines = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{port}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def http_post(port: int, path: str, body: str, kind: str = "application/json") -> bytes:
    """Return a POST request as bytes."""
    data = body.encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def open_stream(port: int, path: str, transport: str) -> bytes:
    """Return the request that opens a stream of the transport `sse` or `ws`."""
    if transport == "sse":
        return http_get(port, path, Accept="text/event-stream")
    return http_get(
        port,
        path,
        Connection="Upgrade",
        Upgrade="websocket",
        Sec_WebSocket_Version="13",
        Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZQ==",
    )
