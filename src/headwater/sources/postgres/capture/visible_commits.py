"""Visibility of received commits. Capture takes in only visible ones, so that a reader that receives a change can read
its row; a commit that waits for a standby is captured once the standby has confirmed it."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from headwater.errors import HeadwaterError
from headwater.sources.postgres.capture.barriers import SideSession
from headwater.sources.postgres.capture.replication_buffer import ReplicationBuffer
from headwater.sources.postgres.connection import Server
from headwater.sources.postgres.snapshot_visibility import Visibility, snapshot_now

BLIND_SECONDS = 1.0
AT_ONCE = 3  # queries in a row: most commits become visible a moment after they are written
SOON = 10  # times in a row that capture is called again soon


class VisibleUpto(msgspec.Struct, frozen=True):
    """The offset up to which everything is visible, and the visible transaction `large`, if any; `trouble` is the error
    that prevented knowing more."""

    upto: int
    large: str = ""
    trouble: HeadwaterError | None = None


class VisibleCommits:
    """Commits that new snapshots of the database can see, read over a connection of its own. Capture thread only."""

    def __init__(self, server: Server, visibility: Visibility, again: Callable[[], None]) -> None:
        self._side, self._visibility, self._again = SideSession(server, statement_timeout="60000"), visibility, again
        self._unseen = 0  # consecutive queries in which nothing more was visible
        self._blind_since: float | None = None

    def read(self, held: ReplicationBuffer) -> VisibleUpto:
        """Return the visible commits; query PostgreSQL only if a received commit is not known to be visible."""
        large, visible = held.large, self._visibility.visible
        if not large and held.whole.offset <= visible:
            return VisibleUpto(visible)
        try:
            for _ in range(AT_ONCE):
                snapshot = self._side.ask(snapshot_now)
                self._visibility.notice(snapshot)
                if self._visibility.visible > visible or self._unseen:
                    break
        except HeadwaterError as error:
            self._blind_since = self._blind_since or time.monotonic()
            return VisibleUpto(visible, trouble=error)
        self._blind_since = None
        found = VisibleUpto(self._visibility.visible, large if large and snapshot.sees(int(large)) else "")
        self._unseen = 0 if found.upto > visible or found.large else self._unseen + 1
        if found.upto < held.whole.offset and self._unseen < SOON:
            self._again()
        return found

    def gives_up(self) -> bool:
        """Return True once when PostgreSQL could not be queried for a while. A server that shuts down accepts no
        sessions and waits until its stream is confirmed: capture must then stop waiting for visibility."""
        if self._blind_since is None or time.monotonic() - self._blind_since < BLIND_SECONDS:
            return False
        self._blind_since = None
        return True

    def close(self) -> None:
        """Close the connection; the next `read` connects again."""
        self._side.close()
