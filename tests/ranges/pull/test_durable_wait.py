"""Waits for durable changes: which are woken, and how many one caller may have."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from headwater.errors import LimitExceeded
from headwater.log.live.live_log import LiveLog
from headwater.model.work.work_context import CALLER
from headwater.ranges.pull import durable_wait
from headwater.ranges.pull.durable_wait import DurableWaits


class Log:
    """A log of which `latest` is staged and `durable` follows."""

    def __init__(self) -> None:
        self.latest = self.durable = 0
        self.listeners: list[Any] = []

    def add_listener(self, listener: Any) -> None:
        self.listeners.append(listener)

    def remove_listener(self, listener: Any) -> None:
        self.listeners.remove(listener)

    def stage(self, upto: int) -> None:
        self.latest = upto
        for listener in self.listeners:
            listener()


def waiting(room: DurableWaits, log: Log, offset: int, caller: str = "") -> asyncio.Task[None]:
    async def wait() -> None:
        CALLER.set(caller)
        await room.beyond(cast(LiveLog, log), offset, 60, lambda: True)

    return asyncio.ensure_future(wait())


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_only_waits_whose_offset_is_durable_are_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_wait, "FLUSH_SECONDS", 0)
    looks = 0
    inherited = asyncio.Event.set

    def count(event: asyncio.Event) -> None:
        nonlocal looks
        looks += 1
        inherited(event)

    async def work() -> None:
        room, log = DurableWaits(), Log()
        far = [waiting(room, log, 5) for _ in range(10)]
        near = waiting(room, log, 0)
        await turns()
        monkeypatch.setattr(asyncio.Event, "set", count)
        log.stage(3)
        await turns()
        assert not looks and not near.done(), "nothing is durable yet"
        log.durable = 3
        await turns()
        assert near.done() and looks == 1, "those who wait for more were not disturbed"
        log.stage(9)
        log.durable = 9
        await asyncio.gather(*far)
        assert not log.listeners and not room._held

    asyncio.run(work())


def test_one_caller_may_use_a_fourth_of_the_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        room, log = DurableWaits(most=8), Log()
        mine = [waiting(room, log, 0, "ada") for _ in range(2)]
        await turns()
        with pytest.raises(LimitExceeded, match="of your requests wait"):
            await waiting(room, log, 0, "ada")
        others = [waiting(room, log, 0, name) for name in ("bob", *["anonymous"] * 3)]
        await turns()
        room.drain()
        await asyncio.gather(*mine, *others)
        assert room._held.total == 0

    asyncio.run(work())
