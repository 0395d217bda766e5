"""The head of a live log: its newest offset and time, and the threads and listeners that follow it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from headwater.model.change import Transaction

Listener = Callable[[], None]


class Head:
    """The newest transaction that can be read. Its owner moves it under `changed`, then calls `notify`."""

    def __init__(self, latest: int, *, ts: int, closed_ts: int) -> None:
        self.changed = threading.Condition()  # guards these fields and those of the owner; never held during I/O
        self.latest = self.highest = latest
        self.ts = ts
        self.closed = (closed_ts, latest)
        self._listeners: tuple[Listener, ...] = ()
        self._is_stopped = False

    def move(self, part: Transaction) -> None:
        """Make `part` the newest transaction."""
        self.latest, self.ts = part.upto, part.ts
        self.highest = max(self.highest, part.upto)

    def restart(self, first: int) -> None:
        """Reset to `first - 1`, for a new generation that begins at `first`."""
        self.latest = self.highest = first - 1
        self.closed = (self.closed[0], first - 1)

    def close_at(self, ts: int) -> None:
        """Set `closed` to `ts` and `latest`; the caller must stage only times above `ts` from now on."""
        self.closed = (ts, self.latest)

    def wait_beyond(self, offset: int, timeout: float | None = None) -> bool:
        """Block until `latest` is above `offset`, the log is closed or `timeout` ends; return whether it is above."""
        with self.changed:
            self.changed.wait_for(lambda: self.latest > offset or self._is_stopped, timeout)
            return self.latest > offset

    def add_listener(self, listener: Listener) -> None:
        """Call `listener` whenever `latest` has moved, in the capture thread; `listener` must not block or raise."""
        with self.changed:
            self._listeners = (*self._listeners, listener)

    def remove_listener(self, listener: Listener) -> None:
        """Stop calling `listener`."""
        with self.changed:
            self._listeners = tuple(other for other in self._listeners if other != listener)

    @property
    def has_listeners(self) -> bool:
        """Return whether there is a listener."""
        return bool(self._listeners)

    def notify(self) -> None:
        """Wake the threads that wait, and call the listeners."""
        with self.changed:
            self.changed.notify_all()
        for listener in self._listeners:
            listener()

    def stop(self) -> None:
        """End every current and later `wait_beyond`."""
        with self.changed:
            self._is_stopped = True
            self.changed.notify_all()
