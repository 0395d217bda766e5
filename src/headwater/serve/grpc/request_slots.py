"""Limits on gRPC requests that are being received: how many at a time, and for how long.

gRPC lets a client send the whole announced length of a message once a read has begun, so each read that waits for the
rest may hold `serve.max_body_bytes` of memory. A stream without a read holds only the first `WINDOW` bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio

from headwater.errors import Busy, InvalidRequest

WINDOW = 16 << 10  # bytes of a stream that are received before its request is read
CONTENDED_SECONDS = 5.0  # limit for receiving a request while another one waits for its slot


class RequestSlots:
    """Receives `total` requests concurrently, at most `each` of one caller. Not thread-safe.

    A request that does not arrive within `seconds` is refused, and so is a request of a caller of whom `waiting` others
    wait already.
    """

    def __init__(self, *, total: int, each: int, waiting: int, seconds: float) -> None:
        self.total, self.each, self.waiting, self.seconds = total, each, waiting, seconds
        self._free = asyncio.Semaphore(total)
        self._waiting = 0  # requests that wait for a slot that another caller uses
        self._callers: dict[Hashable, _Caller] = {}
        self._arriving: dict[asyncio.Timeout, float] = {}  # oldest first: when the read of each began

    async def receive(self, key: Hashable, context: aio.ServicerContext[Any, Any]) -> Any:
        """Return a call's next request, None after the last. Raises Busy without a slot, InvalidRequest if late."""
        is_read = False
        try:
            async with asyncio.timeout(self.seconds) as deadline, self._slot(key, deadline):
                is_read = True
                received = await context.read()
        except TimeoutError:
            if is_read:
                raise InvalidRequest(
                    "the request arrived too slowly", hint="Send the request again without pauses."
                ) from None
            raise _busy() from None
        return None if received is aio.EOF else received  # type: ignore[attr-defined]  # missing in the stubs

    @asynccontextmanager
    async def _slot(self, key: Hashable, deadline: asyncio.Timeout) -> AsyncIterator[None]:
        caller = self._callers.get(key)
        if caller is None:
            caller = self._callers[key] = _Caller(self.each)
        if caller.calls >= self.each + self.waiting:
            raise _busy()
        caller.calls += 1
        try:
            async with caller.free:
                await self._acquire()
                try:
                    self._arriving[deadline] = asyncio.get_running_loop().time()
                    if self._waiting:
                        self._hurry()
                    yield
                finally:
                    del self._arriving[deadline]
                    self._free.release()
        finally:
            caller.calls -= 1
            if not caller.calls:
                del self._callers[key]

    async def _acquire(self) -> None:
        if not self._free.locked():
            await self._free.acquire()
            return
        self._waiting += 1
        try:
            self._hurry()
            await self._free.acquire()
        finally:
            self._waiting -= 1

    def _hurry(self) -> None:
        """Shorten the deadline of the oldest read whose deadline was not shortened yet."""
        for deadline, began in self._arriving.items():
            until, when = began + CONTENDED_SECONDS, deadline.when()
            if when is not None and not deadline.expired() and until < when:
                deadline.reschedule(until)
                return


class _Caller:
    """The requests of one caller that are being received or wait for a slot."""

    __slots__ = ("calls", "free")

    def __init__(self, each: int) -> None:
        self.calls, self.free = 0, asyncio.Semaphore(each)


def _busy() -> Busy:
    return Busy("too many requests are being received", hint="Retry in a moment, or send fewer requests in parallel.")
