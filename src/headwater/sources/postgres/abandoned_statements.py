"""Statements that PostgreSQL did not end in time: their connections were closed, and the server may still run them.

Some functions, such as strpos(), do not check for interrupts: neither statement_timeout nor pg_terminate_backend() ends
them. A caller whose statement still runs may not start another until it has ended. Other callers are not affected,
unless too many such statements run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

import msgspec

from headwater.errors import Busy
from headwater.model.work.work_context import UNNAMED

MOST = 16  # abandoned statements that may run while new statements of other callers are accepted
RUNNING = "SELECT pid, backend_start::text FROM pg_stat_activity WHERE pid = ANY ($1::int[])"
_HINT = "Try again in a few minutes. Operators: see pg_stat_activity."

Ask = Callable[[Collection[int]], dict[int, str | None]]


class _Process(msgspec.Struct, frozen=True):
    caller: str
    started: str | None = None  # when the process started, once known


class AbandonedStatements:
    """The server processes of a source whose connections were closed while they ran a statement. Thread-safe."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()  # guards _processes
        self._processes: dict[int, _Process] = {}  # by process id

    def __len__(self) -> int:
        return len(self._processes)

    def add(self, process: int, caller: str = "") -> None:
        """Record a server process that still runs a statement of `caller`."""
        with self._lock:
            self._processes[process] = _Process(caller)

    def may_refuse(self, caller: str, *, is_trusted: bool = False) -> bool:
        """Return whether `check` would refuse `caller` if none of the known processes has ended."""
        with self._lock:
            return self._reason(caller, is_trusted) is not None

    def check(self, ask: Ask, caller: str, *, is_trusted: bool = False) -> None:
        """Forget the processes that have ended. Raise Busy if one of `caller` still runs, or too many do.

        `ask` returns the start time of each given process that PostgreSQL still runs: see RUNNING. The total number of
        processes does not limit trusted work, which is that of owners.
        """
        with self._lock:
            known = dict(self._processes)
        running = ask(known)
        with self._lock:
            for process, before in known.items():
                now = running.get(process)
                if self._processes.get(process) is not before:
                    continue  # another thread has updated the entry
                if process not in running or (before.started and now and before.started != now):  # the id was reused
                    del self._processes[process]
                elif now:
                    self._processes[process] = _Process(before.caller, now)
            reason = self._reason(caller, is_trusted)
        if reason is not None:
            raise Busy(reason, hint=_HINT)

    def _reason(self, caller: str, is_trusted: bool) -> str | None:
        if caller not in UNNAMED and any(each.caller == caller for each in self._processes.values()):
            return "PostgreSQL still runs a statement of yours that is past its time limit and cannot be interrupted"
        if len(self._processes) >= self._most and not is_trusted:
            count = len(self._processes)
            return f"PostgreSQL still runs {count} statements that are past their time limit and cannot be interrupted"
        return None
