"""Deleting captured rows once the log holds them: lazily, in one short transaction, never the newest row.

Each move has a nonce. The log learns of it before the file commits it, so that a file restored from before
the move is recognised by the nonce it lacks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from headwater.errors import HeadwaterError
from headwater.sources.capture_stream import Notes
from headwater.sources.sqlite.capture.trigger_installation import set_meta
from headwater.sources.sqlite.capture.triggers import CAPTURE, REPLACED, STASH, TXN
from headwater.sources.sqlite.query.authorizer import Guard

MAX_STEP = 20_000  # rows of one move: a foreign writer waits as long as deleting these takes; more far behind


class Trimmer:
    """Called from the capture thread; the delete itself runs in the writer's queue."""

    def __init__(
        self,
        notes: Notes,
        submit: Callable[[Callable[[Any], int]], Future[Any]],
        guard: Guard,
        *,
        rows: int,
        seconds: float,
    ) -> None:
        self._notes, self._submit, self._guard = notes, submit, guard
        self._rows, self._seconds = rows, seconds
        self.trimmed = 0  # everything at or below may be gone from the file
        self.nonces: tuple[str, ...] = ()  # of the last move that is done, and of the one that may be
        self._running: tuple[Future[Any], str, int] | None = None
        self._last = time.monotonic()

    def start(self, nonce: str, trimmed: int) -> None:
        """Begin with a proven file."""
        self.nonces, self.trimmed, self._running = (nonce,), trimmed, None

    def acknowledge(self, upto: int) -> None:
        """The log holds everything at or below `upto`: forget it when enough came together or it is time."""
        self._collect()
        waiting = upto - self.trimmed
        due = time.monotonic() - self._last >= self._seconds
        if self._running is None and waiting > 0 and (waiting >= self._rows or due):
            self._begin(min(upto, self.trimmed + max(MAX_STEP, waiting // 4)))

    def _begin(self, upto: int) -> None:
        # A move that failed may have reached the file nevertheless: the next one takes its nonce over.
        nonce = self.nonces[1] if len(self.nonces) > 1 else secrets.token_hex(8)
        self._last = time.monotonic()
        # Both: a kill may have kept the log from learning that the last move is done.
        self._notes.set_notes(nonce=self.nonces[0], pending_nonce=nonce)
        self.nonces = (self.nonces[0], nonce)
        try:
            self._running = (self._submit(lambda _: self._delete(upto, nonce)), nonce, upto)
        except HeadwaterError:
            return  # the queue is full or closing: the next call tries again

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
            db.execute(f"DELETE FROM {STASH}")  # between transactions whatever is left there is of no use
            set_meta(db, "nonce", nonce)
            return upto
