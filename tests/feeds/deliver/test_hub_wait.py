"""Waits for the hub: a timeout must not hide a change published at the same moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headwater.feeds.deliver.hub_wait import HubWait


class Group:
    """The parts of a hub's group that a wait uses. `published` counts frames, `offset` is their offset."""

    def __init__(self) -> None:
        self.published, self.offset = 0, 0
        self.failed, self.is_live = None, True
        self.waiting: set[Any] = set()

    def seek(self, cursor: int) -> int:
        return self.published - (self.offset > cursor)

    def offset_after(self, seen: int) -> int:
        return self.offset


class Hub:
    """A hub with one group, and its published offset."""

    def __init__(self) -> None:
        self.upto, self.group = 3, Group()

    def join(self, view: Any, frame: Any) -> Group:
        return self.group

    def leave(self, group: Group) -> None:
        pass

    def reached(self, view: Any) -> int:
        return self.upto


@pytest.mark.parametrize(("passing", "reached"), [(True, 3), (False, 5)])
def test_change_published_at_the_timeout_is_not_skipped(passing: bool, reached: int) -> None:
    async def wait() -> int:
        hub = Hub()

        def publish_too_late_to_wake() -> None:
            hub.upto = 5
            hub.group.published, hub.group.offset = (1, 4) if passing else (0, 0)

        asyncio.get_running_loop().call_soon(publish_too_late_to_wake)
        return await HubWait(hub, None).beyond(3, 0.01)  # type: ignore[arg-type]

    assert asyncio.run(wait()) == reached
