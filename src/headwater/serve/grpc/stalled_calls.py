"""Cut-off of gRPC callers that leave an answer unread, checked periodically, so that messages cost little."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from grpc import aio

from headwater.errors import Busy, HeadwaterError, Unavailable
from headwater.model.work.usage import Usage
from headwater.serve.grpc.connections.acceptor import address_in
from headwater.serve.limits.rates import place_of
from headwater.serve.limits.slow_reader_limits import PROGRESS

CHECKS = 4  # within the time that a message may wait
MAX_UNREAD = 2_000  # answers to the calls of one address; each takes the gRPC library 24 KiB besides its message
MAX_FACTOR = 12  # by which a large answer may take longer than a small one


class StreamingCall(Protocol):
    """A call with a stream of answers."""

    @property
    def pending(self) -> int | None:
        """Return the number of the message that the caller has not received yet; None if there is none."""

    def cut(self, error: HeadwaterError) -> None:
        """End the call with `error`."""


class StalledCalls:
    """Ends a call whose current message is unread for `seconds`, at most one check later. Not thread-safe."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: dict[StreamingCall, tuple[int | None, float]] = {}  # the message that waited, and since when
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watch(self, call: StreamingCall) -> Iterator[None]:
        """Watch a call while the context is open."""
        self._seen[call] = None, 0.0
        if self._timer is None:
            self._later()
        try:
            yield
        finally:
            del self._seen[call]
            if not self._seen and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds / CHECKS, self._check)

    def _check(self) -> None:
        now = asyncio.get_running_loop().time()
        for call, (waited, since) in self._seen.items():
            pending = call.pending
            if pending is None or pending != waited:
                self._seen[call] = pending, now
            elif now - since >= self._seconds:
                call.cut(unread(self._seconds))
        self._later()


class _Answer(NamedTuple):
    """An answer that gRPC has not sent yet."""

    number: int
    peer: str  # the name that the gRPC library has for the connection
    place: str  # of the address of the caller
    until: float  # when the connection is closed


class UnreadAnswers:
    """Closes the connection of a caller that leaves an answer unread for `seconds`; larger ones may take longer.

    For calls with one answer, health and reflection: the gRPC library has no way to end such a call while its answer
    waits. Not thread-safe.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._number = 0
        self._waiting: dict[int, _Answer] = {}
        self._from: Usage[str] = Usage()
        self._timer: asyncio.TimerHandle | None = None
        self.close: Callable[[str, str], None] = lambda peer, why: None  # closes a connection; set by the server

    def add(self, context: aio.ServicerContext[Any, Any], size: int) -> None:
        """Watch an answer of `size` bytes until its call has ended; Busy if the caller's address has too many."""
        answer = self._add(context.peer(), size)
        done: Any = lambda _: self._remove(answer)  # noqa: E731  # the stubs name its argument
        context.add_done_callback(done)

    @contextmanager
    def sending(self, context: aio.ServicerContext[Any, Any]) -> Iterator[None]:
        """Watch a small message while the block sends it; Busy if too many wait for the caller's address."""
        answer = self._add(context.peer(), 0)
        try:
            yield
        finally:
            self._remove(answer)

    def _add(self, peer: str, size: int) -> _Answer:
        place = place_of(address_in(peer))
        if self._from[place] >= MAX_UNREAD:
            raise Busy(f"{MAX_UNREAD} answers to your address are unread", hint="Read them first.")
        now = asyncio.get_running_loop().time()
        self._number += 1
        factor = min(1 + size // PROGRESS, MAX_FACTOR)
        answer = self._waiting[self._number] = _Answer(self._number, peer, place, now + self._seconds * factor)
        self._from.add(place)
        if self._timer is None:
            self._later()
        return answer

    def _remove(self, answer: _Answer) -> None:
        if self._waiting.pop(answer.number, None) is not None:
            self._from.remove(answer.place)

    def _later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds / CHECKS, self._check)

    def _check(self) -> None:
        now = asyncio.get_running_loop().time()
        for peer in {answer.peer for answer in self._waiting.values() if answer.until <= now}:
            self.close(peer, f"it has left an answer unread for {self._seconds:g} s")
        self._timer = None
        if self._waiting:
            self._later()


def unread(seconds: float) -> Unavailable:
    """Return the error for a caller that does not read."""
    return Unavailable(
        f"an answer was left unread for {seconds:g} s",
        hint="Read faster, or resume from your last position; the limit is serve.stall_seconds.",
    )
