"""The follow loop: what a source commits is staged at once, made durable in blocks, then acknowledged.

    source.follow --stamp--> stage (readable) --flush--> log (durable) --> source.acknowledge

Every step may be cut off by kill -9. What was not durable is followed again under the same offsets; what
was durable is skipped, because following starts after the log's newest offset.
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
from headwater.model.log_throttle import Repeats, counted
from headwater.sources.capture_stream import STOPPED, Capturable
from headwater.sources.read import Look

logger = logging.getLogger("headwater.capture")

STAGE = 512  # changes staged at a time: one block
GATHER = 8  # parts of a transaction that are waited for, so that it is staged with others; a larger one goes alone
FLUSH_CHANGES = 8_192  # staged changes that do not wait for the clock: one fsync for so many, far behind
MAX_STAGED = 16_384  # past this, with a log that cannot be written, following stops
LEAP = 1 << 24  # above what is durable, where nobody knows what was told beyond it before a crash: more than that
PASS_SECONDS = 0.002  # between two passes under load: commits that come together go out together
CLOSE_SECONDS = 0.1  # between two closed times
GLANCE_SECONDS = 0.005  # between two looks at a schema that is being taken in
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
        self._current_at: float | None = None  # when the log last held everything the source had
        self._broken: str | None = None  # why the source is not the one this log follows, until a new one is begun
        self._lost_log: LogDamaged | None = None  # the log cannot be written any more: only a restart helps
        self._repeats = Repeats()
        self.error: str | None = None  # why capture stands still; written by the capture thread only
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"headwater-capture-{source.name}", daemon=True)

    def start(self) -> None:
        """Prove that log and source belong together, then follow."""
        self.prove()
        self.begin()

    def prove(self) -> None:
        """Prove that log and source belong together, or begin a new generation."""
        log = self._log
        reason = self._source.prove(
            generation=log.generation, latest=log.latest, read=lambda after: log.scan(after=max(after, log.horizon - 1))
        )
        if reason:
            self._check_may_begin_anew(reason)
            is_known = not log.latest or log.note(STOPPED)
            self._begin_anew(reason, above=2 if is_known else LEAP)
        elif log.latest < self._source.beginning:
            log.restart(first=self._source.beginning + 1, reason=log.generation_reason, name=log.generation)

    def begin(self) -> None:
        """Catch up once, then follow in a thread. A log that has no space yet is written later."""
        try:
            self._pass()
        except StorageFull as error:
            self._fail(f"{error.code}: {error.message}")
        self._thread.start()

    def reach(self, offset: int, timeout: float) -> bool:
        """Wait until the log holds `offset`; whether it does."""
        if self._log.latest >= offset:
            return True
        self._source.wake()
        return self._log.wait_beyond(offset - 1, timeout)

    def glance(self) -> Look | None:
        """Where the source stands, if that is seen at once and the log holds all of it."""
        found = self._source.glance() if self._broken is None else None
        return found if found is not None and found.settled and self._log.latest >= found.head else None

    def look(self, timeout: float) -> tuple[Look, bool]:
        """Where the source stands, and whether the log came that far; tries to make it so."""
        deadline = time.monotonic() + timeout
        while True:
            found = self._source.glance() or self._source.look()
            is_reached = self.reach(found.head, max(deadline - time.monotonic(), 0))
            is_sound = self._broken is None
            if (found.settled and is_sound) or time.monotonic() >= deadline or (self._stop_when_lost and not is_sound):
                return found, is_reached and is_sound
            # A change of the schema is not taken in yet. It need not have an offset that could be waited for.
            self.reach(found.head + 1, GLANCE_SECONDS)

    def catch_up(self, timeout: float) -> bool:
        """Wait until the log holds everything committed before this call."""
        found, is_reached = self.look(timeout)
        return found.settled and is_reached

    def lag_seconds(self) -> float | None:
        """How long the log has been behind the source; None until it is known."""
        return (
            None
            if self._current_at is None
            else max(time.monotonic() - self._current_at - 2 * self._flush_seconds, 0.0)
        )

    def stop(self) -> None:
        """Take in what is committed, make it durable, stop."""
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
                self._stopping.wait(0.2)  # a busy file or a bad disk: look again in a moment

    def _attempt(self) -> bool:
        """One step; errors become `error` and are tried again, for ever."""
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
            if said != self.error:  # not at every attempt
                logger.exception("capture of %s failed", self._source.name)
            self._fail(said)
            return False
        self.error = None
        return True

    def _step(self) -> None:
        """Wait and take in what came; where the history broke off, begin a new one, however often that fails."""
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
        self._check_may_begin_anew(self._broken)
        self._source.reopen()
        self._begin_anew(self._broken)
        self._broken = None

    def _fail(self, error: str) -> None:
        if error != self.error:
            left_out = self._repeats.again(error.partition(":")[0], time.monotonic())  # by its code
            if left_out is not None:
                logger.warning("capture of %s stands still: %s", self._source.name, counted(error, left_out))
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
        """Stage whole transactions; one of many parts goes to the log in one step, as they come."""
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
                    self._source.acknowledge(self._log.durable)  # a long way behind, this pass may last
        self._log.stage(batch)

    def _close_if_due(self) -> None:
        """For those who listen: everything up to here is staged, and what comes gets a later time."""
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
        """One bounded step of retention and merging; more when there is nothing else to do."""
        if time.monotonic() - self._housekept < HOUSEKEEPING_SECONDS or self._log.staged_changes:
            return
        self._housekept = time.monotonic()
        self._log.retain(self._retention, now_ms=wall_ms())
        self._log.merge()

    def _check_may_begin_anew(self, reason: str) -> None:
        """Log and source do not belong together: a stop with the way out, if so configured."""
        if self._stop_when_lost:
            raise SourceMismatch(
                reason,
                hint="Start with on_discontinuity = 'new_generation' to go on: readers take a new snapshot.",
            )

    def _begin_anew(self, reason: str, *, above: int = 2) -> None:
        """A new generation, in the source first: cut off between the two, it is found to be another's.

        What is read between them is of the old generation. The other way round it would count as of the new one,
        which tells nothing of what is committed before it begins in the source.
        """
        self._log.unstage()
        generation = secrets.token_hex(8)
        first = self._source.restart(generation=generation, first=self._log.highest + above)
        self._log.restart(first=first, reason=reason, name=generation)
        self._stamper = Stamper(self._log)
        logger.warning("%s: new log generation %s at offset %d: %s", self._source.name, generation, first, reason)


def _rest(parts: Iterator[Transaction], most: int | None = None) -> Iterator[Transaction]:
    """The parts up to the end of the transaction that has begun, or as many as `most` of them."""
    for part in islice(parts, most):
        yield part
        if part.last:
            return
