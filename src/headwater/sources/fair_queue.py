"""Queue of jobs in which callers take turns, so that no caller can block all others."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

J = TypeVar("J")


class FairQueue(Generic[J]):
    """Queue of jobs by caller: callers take turns, and the jobs of one caller stay in their order.

    At most `share` jobs of one caller run concurrently; without a share `done` need not be called. Not thread-safe:
    the user of the queue must hold a lock.
    """

    def __init__(self, share: int | None = None) -> None:
        self._share = share
        self._jobs: dict[str, deque[J]] = {}  # ordered by turn: the next caller first
        self._running: dict[str, int] = {}
        self._size = 0

    def __len__(self) -> int:
        """Return the number of waiting jobs."""
        return self._size

    def put(self, caller: str, job: J) -> None:
        """Append a job of `caller`, who takes the last turn unless jobs of `caller` wait already."""
        jobs = self._jobs.get(caller)
        if jobs is None:
            self._jobs[caller] = deque((job,))
        else:
            jobs.append(job)
        self._size += 1

    def take(self) -> J | None:
        """Remove and return the next job whose caller may run another one; None if there is none."""
        share = self._share
        for caller in self._jobs:
            if share is None:
                break
            running = self._running.get(caller, 0)
            if running < share:
                self._running[caller] = running + 1
                break
        else:
            return None
        jobs = self._jobs.pop(caller)
        job = jobs.popleft()
        if jobs:
            self._jobs[caller] = jobs  # now last in turn
        self._size -= 1
        return job

    def done(self, caller: str) -> None:
        """Record the end of a job of `caller`, so that another one may run."""
        left = self._running[caller] - 1
        if left:
            self._running[caller] = left
        else:
            del self._running[caller]
