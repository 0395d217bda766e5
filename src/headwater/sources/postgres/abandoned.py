"""Statements that PostgreSQL did not end in time: their connections were closed, and the server may still run them.

Some functions, such as strpos(), do not check for interrupts: neither statement_timeout nor pg_terminate_backend() ends
them. No more than a few may run at a time; until one has ended, new statements of callers are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from headwater.errors import Busy

MOST = 4  # that may still run while new statements are accepted
RUNNING = "SELECT pid, backend_start::text FROM pg_stat_activity WHERE pid = ANY ($1::int[])"


class Abandoned:
    """Server processes of one source whose connections were closed while they ran a statement. Thread-safe."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()  # guards _started
        self._started: dict[int, str | None] = {}  # by process id: when it started, once that is known

    def __len__(self) -> int:
        return len(self._started)

    @property
    def is_full(self) -> bool:
        """Return whether new statements must wait until some of the processes have ended."""
        return len(self._started) >= self._most

    def add(self, process: int) -> None:
        """Remember a server process that still runs a statement."""
        with self._lock:
            self._started[process] = None

    def check(self, ask: Callable[[Collection[int]], dict[int, str | None]]) -> None:
        """Forget the processes that have ended. Raises Busy if too many still run.

        `ask` returns when those of the given processes started that PostgreSQL still has: see RUNNING.
        """
        with self._lock:
            known = dict(self._started)
        running = ask(known)
        with self._lock:
            for process, before in known.items():
                now = running.get(process)
                if process not in running or (before and now and before != now):  # another one by this number
                    self._started.pop(process, None)
                else:
                    self._started[process] = now or before
            left = len(self._started)
        if left >= self._most:
            raise Busy(
                f"PostgreSQL still runs {left} statements that were past their time limit and cannot be interrupted",
                hint="Try again in a few minutes. Operators: see pg_stat_activity.",
            )
