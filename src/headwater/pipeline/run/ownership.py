"""Leases: at most one pipeline server works on a task at any time, even if servers die or their clocks differ.

A lease is a row of the meta store, compared and set in one statement by the database's own clock. Each new lease has
a higher number, the fence; writes under an older fence are rejected.
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
from headwater.pipeline.run.progress import MetaStore, of_task
from headwater.pipeline.run.task import Task

BEATS = 3  # renewals per lease duration


def owner_name() -> str:
    """Return a unique name for this server: host, process id and a random part."""
    return f"{socket.gethostname()[:100]}:{os.getpid()}:{secrets.token_hex(4)}"


def take(meta: MetaStore, task: Task, owner: str, seconds: float) -> int:
    """Take the lease if it is free, expired or ours; return its fence. NotOwner names the holder and the time left."""
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
    """Extend the lease to `seconds` from now; raise NotOwner if it was taken or reset."""
    mine = (SUBSCRIBE.c.owner == owner) & (SUBSCRIBE.c.fence == fence)
    with meta.database.transaction() as connection:
        update = sa.update(SUBSCRIBE).where(of_task(task), mine).values(**_until(meta.database.now, seconds))
        if not connection.execute(update).rowcount:
            raise NotOwner(f"the lease on {task.db}.{task.table} of {task.name} was lost")


def release(meta: MetaStore, task: Task, owner: str, fence: int) -> None:
    """Release the lease; do nothing if it is no longer ours."""
    mine = (SUBSCRIBE.c.owner == owner) & (SUBSCRIBE.c.fence == fence)
    with meta.database.transaction() as connection:
        connection.execute(sa.update(SUBSCRIBE).where(of_task(task), mine).values(owner="", owner_until_ms=0))


def _until(now: sa.ColumnElement[int], seconds: float) -> dict[str, Any]:
    return {"owner_until_ms": now + int(seconds * 1000), "updated_ms": now}


class _ExpiryEvent(threading.Event):
    """An event that is also set by time: a meta store that hangs must not hide that the lease expired."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        super().__init__()
        self._is_over = is_over

    def is_set(self) -> bool:
        return super().is_set() or self._is_over()


class LeaseRenewal:
    """A lease that a thread renews until `stop`; `lost` is set as soon as another pipeline server may hold it."""

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
        self._until = clock() + seconds  # counted from before the request: never later than the database's expiry
        self.fence = take(meta, task, owner, seconds)
        self.lost = _ExpiryEvent(lambda: clock() >= self._until)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lease of {task.table}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the renewals and release the lease."""
        self._stopping.set()
        self._thread.join()
        if not self.lost.is_set():
            with suppress(HeadwaterError):  # the lease expires by itself
                release(self._meta, self._task, self._owner, self.fence)

    def renew(self) -> bool:
        """Renew once; return whether the lease is ours: until it expires, if the meta store does not answer."""
        asked = self._clock()
        try:
            renew(self._meta, self._task, self._owner, self.fence, self._seconds)
            self._until = asked + self._seconds
        except NotOwner:
            self.lost.set()
        except HeadwaterError:
            pass  # the store did not answer: `lost` is set by time
        return not self.lost.is_set()

    def _run(self) -> None:
        while not self._stopping.wait(self._seconds / BEATS):
            if not self.renew():
                return
