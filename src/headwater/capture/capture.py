"""The capture loop: commits of a source are staged immediately, made durable in blocks, then acknowledged.

    source.follow --stamp--> stage (readable) --flush--> log (durable) --> source.acknowledge

A kill -9 may interrupt any step. Changes that were not durable are read again under the same offsets; durable changes
are skipped, because reading starts after the log's newest offset.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from itertools import chain, islice

from headwater.capture.commit_timestamps import Stamper
from headwater.errors import HeadwaterError, LogDamaged, SourceMismatch, StorageFull
from headwater.log.live.live_log import LiveLog
from headwater.log.log import Retention
from headwater.model.change import Transaction
from headwater.model.clock import wall_ms
from headwater.model.work.log_throttle import LogThrottle, counted
from headwater.sources.capture_stream import STOPPED, Capturable
from headwater.sources.read import SourceHead

logger = logging.getLogger("headwater.capture")

STAGE = 512  # changes staged at a time: one block
GATHER = 8  # most parts of a transaction that is staged with others; a larger transaction is appended by itself
FLUSH_CHANGES = 8_192  # staged changes that are flushed without waiting for the timer: one fsync for so many
MAX_STAGED = 16_384  # staged changes at which capture pauses while the log cannot be written
LEAP = 1 << 24  # gap above the durable offset after a crash: readers may have seen staged offsets, but fewer than that
PASS_SECONDS = 0.002  # between two passes under load, so that concurrent commits are processed together
CLOSE_SECONDS = 0.1  # between two closed timestamps
SCHEMA_POLL_SECONDS = 0.005  # between two checks whether a schema change has been captured
HOUSEKEEPING_SECONDS = 1.0  # between two steps of retention or merging


class Capture:
    """One thread that keeps one log up to date with one source."""

    def __init__(
        self,
        source: Capturable,
        log: LiveLog,
        *,
        retention: Retention,
        flush_seconds: float,
        stop_when_lost: bool = False,
    ) -> None:
        self._source, self._log = source, log
        self._retention, self._flush_seconds = retention, flush_seconds
        self._stop_when_lost = stop_when_lost
        self._stamper = Stamper(log)
        self._stopping = threading.Event()
        self._housekept = 0.0
        self._closed_at = 0.0
        self._passed_at = 0.0
        self._current_at: float | None = None  # when the log last had everything that the source had
        self._broken: str | None = None  # why the source does not continue this log, until a new generation begins
        self._lost_log: LogDamaged | None = None  # the log is damaged and cannot be written until a restart
        self._repeats = LogThrottle()
        self.error: str | None = None  # why capture has stopped; written by the capture thread only
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"headwater-capture-{source.name}", daemon=True)

    def start(self) -> None:
        """Call `prove`, then `begin`."""
        self.prove()
        self.begin()

    def prove(self) -> None:
        """Verify that the log continues the source; else begin a new generation, or raise SourceMismatch."""
        log = self._log
        reason = self._source.prove(
            generation=log.generation, latest=log.latest, read=lambda after: log.scan(after=max(after, log.horizon - 1))
        )
        if reason:
            self._check_may_restart(reason)
            is_known = not log.latest or log.note(STOPPED)
            self._begin_generation(reason, above=2 if is_known else LEAP)
        elif log.latest < self._source.beginning:
            log.restart(first=self._source.beginning + 1, reason=log.generation_reason, name=log.generation)

    def begin(self) -> None:
        """Capture everything committed so far, then continue in a thread; on a full disk the thread retries."""
        try:
            self._pass()
        except StorageFull as error:
            self._fail(f"{error.code}: {error.message}")
        self._thread.start()

    def reach(self, offset: int, timeout: float) -> bool:
        """Wait until the log has `offset`, at most `timeout` seconds; return whether it does."""
        if self._log.latest >= offset:
            return True
        self._source.wake()
        return self._log.wait_beyond(offset - 1, timeout)

    def peek_head(self) -> SourceHead | None:
        """Return the head of the source if it is known without I/O and the log has reached it; else None."""
        found = self._source.peek_head() if self._broken is None else None
        return found if found is not None and found.settled and self._log.latest >= found.head else None

    def wait_for_head(self, timeout: float) -> tuple[SourceHead, bool]:
        """Wait at most `timeout` seconds until the log reaches the source's head; return it and whether the log did."""
        deadline = time.monotonic() + timeout
        while True:
            found = self._source.peek_head() or self._source.read_head()
            is_reached = self.reach(found.head, max(deadline - time.monotonic(), 0))
            is_sound = self._broken is None
            if (found.settled and is_sound) or time.monotonic() >= deadline or (self._stop_when_lost and not is_sound):
                return found, is_reached and is_sound
            # A schema change is not captured yet. It may have no offset that could be waited for, so poll.
            self.reach(found.head + 1, SCHEMA_POLL_SECONDS)

    def catch_up(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the log to have every commit before this call; return whether it has."""
        found, is_reached = self.wait_for_head(timeout)
        return found.settled and is_reached

    def lag_seconds(self) -> float | None:
        """Return for how many seconds the log has been behind, less two flush intervals; None before the first pass."""
        if self._current_at is None:
            return None
        return max(time.monotonic() - self._current_at - 2 * self._flush_seconds, 0.0)

    def stop(self) -> None:
        """Stop the thread, then capture what is committed and flush it; errors of that last step are ignored."""
        self._stopping.set()
        self._source.wake()
        if self._thread.is_alive():
            self._thread.join()
        if self._broken is None:
            with contextlib.suppress(HeadwaterError):
                self._pass()
        with contextlib.suppress(HeadwaterError):
            self._log.flush()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._attempt():
                self._stopping.wait(0.2)  # the file may be busy or the disk full: retry in a moment

    def _attempt(self) -> bool:
        """Run one step; set `error` and return False on an error. The caller retries without limit."""
        try:
            if self._lost_log is not None:
                raise self._lost_log
            self._step()
        except LogDamaged as error:
            self._fail(f"{error.code}: {error.message}")
            if self._lost_log is None:
                self._lost_log = error
                self._source.release(error.message)
            return False
        except HeadwaterError as error:
            self._fail(f"{error.code}: {error.message}")
            return False
        except Exception as error:
            said = f"internal: {type(error).__name__}"
            if said != self.error:  # log it once, not at every attempt
                logger.exception("capture of %s failed", self._source.name)
            self._fail(said)
            return False
        self.error = None
        return True

    def _step(self) -> None:
        """Wait for changes and capture them; if the history is broken, begin a new generation."""
        if self._broken is None:
            try:
                self._source.wait(self._flush_seconds)
                self._stopping.wait(self._passed_at + PASS_SECONDS - time.monotonic())
                if not self._stopping.is_set():
                    self._passed_at = time.monotonic()
                    self._pass()
                return
            except SourceMismatch as mismatch:
                self._broken = mismatch.message
        self._check_may_restart(self._broken)
        self._source.reopen()
        self._begin_generation(self._broken)
        self._broken = None

    def _fail(self, error: str) -> None:
        if error != self.error:
            left_out = self._repeats.again(error.partition(":")[0], time.monotonic())  # throttled by error code
            if left_out is not None:
                logger.warning("capture of %s has stopped: %s", self._source.name, counted(error, left_out))
        self.error = error

    def _pass(self) -> None:
        if self._log.staged_changes < MAX_STAGED:
            self._take(map(self._stamper.stamp, self._source.follow(after=self._log.latest)))
            self._current_at = time.monotonic()
            self._close_if_due()
        self._flush_if_due()
        self._source.acknowledge(self._log.durable)
        self.ready.set()
        self._housekeep()

    def _take(self, parts: Iterator[Transaction]) -> None:
        """Stage whole transactions; a transaction of many parts is appended to the log directly, part by part."""
        batch: list[Transaction] = []
        waiting = 0
        for part in parts:
            gathered = [part, *_rest(parts, GATHER - 1)] if not part.last else [part]
            if not gathered[-1].last:
                self._log.stage(batch)
                self._log.append(chain(gathered, _rest(parts)))
                self._source.acknowledge(self._log.durable)
                batch, waiting = [], 0
                continue
            batch += gathered
            waiting += gathered[-1].upto - part.first + 1
            if waiting >= STAGE:
                self._log.stage(batch)
                batch, waiting = [], 0
                if self._flush_if_due():
                    self._source.acknowledge(self._log.durable)  # with a large backlog this pass may take long
        self._log.stage(batch)

    def _close_if_due(self) -> None:
        """Close a timestamp if the log has listeners: all changes up to it are staged, and later ones are above it."""
        if not self._log.has_listeners or time.monotonic() - self._closed_at < CLOSE_SECONDS:
            return
        self._closed_at = time.monotonic()
        self._log.close_at(self._stamper.tick())

    def _flush_if_due(self) -> bool:
        since = self._log.staged_since
        late = since is not None and time.monotonic() - since >= self._flush_seconds
        if not late and self._log.staged_changes < FLUSH_CHANGES:
            return False
        self._log.flush()
        return True

    def _housekeep(self) -> None:
        """Run one bounded step of retention and merging, if nothing is staged."""
        if time.monotonic() - self._housekept < HOUSEKEEPING_SECONDS or self._log.staged_changes:
            return
        self._housekept = time.monotonic()
        self._log.retain(self._retention, now_ms=wall_ms())
        self._log.merge()

    def _check_may_restart(self, reason: str) -> None:
        """Raise SourceMismatch if capture is configured to stop when log and source do not belong together."""
        if self._stop_when_lost:
            raise SourceMismatch(
                reason,
                hint="Start with on_discontinuity = 'new_generation' to continue: readers must take a new snapshot.",
            )

    def _begin_generation(self, reason: str, *, above: int = 2) -> None:
        """Begin a new generation, in the source first: after a crash in between, `prove` finds the mismatch.

        Rows read after the source's step and before the log's are labelled with the old generation. In the other order
        they would be labelled with the new one, which lacks the changes committed before the source's step.
        """
        self._log.unstage()
        generation = secrets.token_hex(8)
        first = self._source.restart(generation=generation, first=self._log.highest + above)
        self._log.restart(first=first, reason=reason, name=generation)
        self._stamper = Stamper(self._log)
        logger.warning("%s: new log generation %s at offset %d: %s", self._source.name, generation, first, reason)


def _rest(parts: Iterator[Transaction], most: int | None = None) -> Iterator[Transaction]:
    """Yield the remaining parts of the current transaction, at most `most` of them."""
    for part in islice(parts, most):
        yield part
        if part.last:
            return
