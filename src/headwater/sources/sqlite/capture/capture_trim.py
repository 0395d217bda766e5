"""Deletion of captured rows that the log holds: lazy, in one short transaction, never the newest row.

Each trim has a nonce. The log records the nonce before the file commits it, so a file restored from before the trim
is recognised by its older nonce.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from headwater.errors import HeadwaterError
from headwater.sources.capture_stream import LogNotes
from headwater.sources.sqlite.capture.trigger_installation import set_meta
from headwater.sources.sqlite.capture.triggers import CAPTURE, REPLACED, STASH, TXN
from headwater.sources.sqlite.query.authorizer import Guard
from headwater.sources.sqlite.settings import SqliteConfig

# Rows per trim, because a foreign writer waits for this delete; a large backlog raises the limit.
MAX_STEP = 20_000


class Trimmer:
    """Trimmer of the capture table, called from the capture thread; each delete runs in the writer's queue."""

    def __init__(
        self, notes: LogNotes, submit: Callable[[Callable[[Any], int]], Future[Any]], guard: Guard, config: SqliteConfig
    ) -> None:
        self._notes, self._submit, self._guard = notes, submit, guard
        self._rows, self._seconds = config.trim_rows, config.trim_seconds
        self.trimmed = 0  # rows at or below this offset may be deleted from the file
        self.nonces: tuple[str, ...] = ()  # nonce of the last completed trim, then of a trim that may have completed
        self._running: tuple[Future[Any], str, int] | None = None
        self._last = time.monotonic()

    def start(self, nonce: str, trimmed: int) -> None:
        """Begin with a file that has `nonce`, whose rows up to offset `trimmed` may be deleted already."""
        self.nonces, self.trimmed, self._running = (nonce,), trimmed, None

    def acknowledge(self, upto: int) -> None:
        """Queue a trim of rows up to `upto`, which the log holds, if enough rows wait or the interval has passed."""
        self._collect()
        waiting = upto - self.trimmed
        due = time.monotonic() - self._last >= self._seconds
        if self._running is None and waiting > 0 and (waiting >= self._rows or due):
            self._begin(min(upto, self.trimmed + max(MAX_STEP, waiting // 4)))

    def _begin(self, upto: int) -> None:
        # A failed trim may still have reached the file, so the next trim reuses its nonce.
        nonce = self.nonces[1] if len(self.nonces) > 1 else secrets.token_hex(8)
        self._last = time.monotonic()
        # Write both nonces: a kill may have prevented the log from recording that the last trim completed.
        self._notes.set_notes(nonce=self.nonces[0], pending_nonce=nonce)
        self.nonces = (self.nonces[0], nonce)
        try:
            self._running = (self._submit(lambda _: self._delete(upto, nonce)), nonce, upto)
        except HeadwaterError:
            return  # the queue is full or closing; the next call retries

    def _collect(self) -> None:
        if self._running is None or not self._running[0].done():
            return
        future, nonce, upto = self._running
        self._running = None
        if future.exception() is None:
            self.trimmed = upto
            self._notes.set_notes(nonce=nonce)
            self.nonces = (nonce,)

    def _delete(self, upto: int, nonce: str) -> int:
        with self._guard.own() as db:
            db.execute(f"DELETE FROM {CAPTURE} WHERE seq <= ? AND seq < (SELECT max(seq) FROM {CAPTURE})", (upto,))
            db.execute(f"DELETE FROM {TXN} WHERE upto <= ?", (upto,))
            db.execute(f"DELETE FROM {REPLACED} WHERE head < ?", (upto,))
            db.execute(f"DELETE FROM {STASH}")  # rows left in the stash are useless between transactions
            set_meta(db, "nonce", nonce)
            return upto
