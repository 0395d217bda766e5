"""Leases: at any time at most one pipeline server works on a task, also when servers die or their clocks differ.

A lease is a row of the meta store, compared and set in one statement by the database's own clock. Each taking has a
higher number, the fence; what is written under an older one is refused.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import sqlalchemy as sa

from headwater.errors import HeadwaterError, NotFound, NotOwner
from headwater.pipeline.run.meta_database import SUBSCRIBE
from headwater.pipeline.run.progress import MetaStore, Task, of_task

BEATS = 3  # renewals in the time of a lease


def owner_name() -> str:
    """A name for this server that no other has: host, process, and something random."""
    return f"{socket.gethostname()[:100]}:{os.getpid()}:{secrets.token_hex(4)}"


def take(meta: MetaStore, task: Task, owner: str, seconds: float) -> int:
    """Take the lease when it is free, expired or ours; its fence. NotOwner says who holds it, and for how long."""
    now = meta.database.now
    free = (SUBSCRIBE.c.owner == "") | (SUBSCRIBE.c.owner == owner) | (SUBSCRIBE.c.owner_until_ms <= now)
    with meta.database.transaction() as connection:
        taken = connection.execute(
            sa.update(SUBSCRIBE)
            .where(of_task(task), free)
            .values(owner=owner, fence=SUBSCRIBE.c.fence + 1, error="", **_until(now, seconds))
        )
        found = connection.execute(
            sa.select(SUBSCRIBE.c.owner, SUBSCRIBE.c.fence, (SUBSCRIBE.c.owner_until_ms - now).label("left")).where(
                of_task(task)
            )
        ).first()
    if found is None:
        raise NotFound(f"there is no task {task}")
    if not taken.rowcount:
        left = max(int(found.left), 0) / 1000
        raise NotOwner(f"{task.db}.{task.table} of {task.name} is held by {found.owner} for another {left:.1f} s")
    return int(found.fence)


def renew(meta: MetaStore, task: Task, owner: str, fence: int, seconds: float) -> None:
    """Keep the lease from now on for `seconds`; NotOwner when it was taken or reset since."""
    mine = (SUBSCRIBE.c.owner == owner) & (SUBSCRIBE.c.fence == fence)
    with meta.database.transaction() as connection:
        update = sa.update(SUBSCRIBE).where(of_task(task), mine).values(**_until(meta.database.now, seconds))
        if not connection.execute(update).rowcount:
            raise NotOwner(f"the lease on {task.db}.{task.table} of {task.name} is no longer ours")


def release(meta: MetaStore, task: Task, owner: str, fence: int) -> None:
    """Give the lease back; nothing happens when it is not ours any more."""
    mine = (SUBSCRIBE.c.owner == owner) & (SUBSCRIBE.c.fence == fence)
    with meta.database.transaction() as connection:
        connection.execute(sa.update(SUBSCRIBE).where(of_task(task), mine).values(owner="", owner_until_ms=0))


def _until(now: sa.ColumnElement[int], seconds: float) -> dict[str, Any]:
    return {"owner_until_ms": now + int(seconds * 1000), "updated_ms": now}


class _Lapse(threading.Event):
    """Set by hand, or by time: a store that hangs must not hide that the lease ran out."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        super().__init__()
        self._is_over = is_over

    def is_set(self) -> bool:
        return super().is_set() or self._is_over()


class Heart:
    """A lease taken, and kept by a thread until `stop`. `lost` is set as soon as it may belong to another."""

    def __init__(
        self,
        meta: MetaStore,
        task: Task,
        owner: str,
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meta, self._task, self._owner, self._seconds = meta, task, owner, seconds
        self._clock = clock
        self._until = clock() + seconds  # counted from before the question: never later than the database counts
        self.fence = take(meta, task, owner, seconds)
        self.lost = _Lapse(lambda: clock() >= self._until)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lease of {task.table}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Renew no more and give the lease back."""
        self._stopping.set()
        self._thread.join()
        if not self.lost.is_set():
            with suppress(HeadwaterError):  # it expires by itself
                release(self._meta, self._task, self._owner, self.fence)

    def beat(self) -> bool:
        """Renew once; whether the lease is still ours. A store that does not answer is asked until it would expire."""
        asked = self._clock()
        try:
            renew(self._meta, self._task, self._owner, self.fence, self._seconds)
            self._until = asked + self._seconds
        except NotOwner:
            self.lost.set()
        except HeadwaterError:
            pass  # it did not answer: `lost` counts the time
        return not self.lost.is_set()

    def _run(self) -> None:
        while not self._stopping.wait(self._seconds / BEATS):
            if not self.beat():
                return
