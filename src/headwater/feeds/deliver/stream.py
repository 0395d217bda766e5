"""Stream: one open reader of a feed. It catches up from the log, then takes what the hub publishes.

snapshot rows ──> catch-up in pages ──> live, at the group's frames ──┐
                        ^                                             │ too slow, or continuity broke
                        └─────────────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from headwater.errors import HeadwaterError, OffsetExpired
from headwater.feeds.deliver.backpressure import HEALTHY, RESNAPSHOT_REQUIRED, Pressure
from headwater.feeds.deliver.catch_up_page import Piece, read_piece
from headwater.feeds.deliver.end_reason import Ending, known
from headwater.feeds.deliver.reader_state import Seat
from headwater.feeds.formats.frame import Frame
from headwater.feeds.groups.group import PIECE, Group
from headwater.feeds.snapshot import SnapshotReader
from headwater.model.clock import ts_text

PAGE = 1024  # changes in one page of catch-up
CHECK_SECONDS = 1.0  # a stream looks this often whether it is lost, where time alone may do that
PING_SECONDS = 15.0  # proxies cut a silent connection after 30 to 60
_encode = msgspec.json.Encoder().encode


class Stream:
    """Hands out frames until it ends. Belongs to one task of the loop; `wake` and `tick` come from others there."""

    def __init__(
        self,
        seat: Seat,
        frame: Frame,
        *,
        cursor: int,
        snapshot: SnapshotReader | None = None,
        upto: int | None = None,
        ping: bytes = b"",
        farewell: bytes = b"",
        checkpoint_seconds: float,
    ) -> None:
        self.seat, self._frame, self.cursor = seat, frame, cursor
        self._snapshot, self._upto = snapshot, upto
        self._loose = snapshot if seat.subscription is None else None  # nothing of it outlives the stream
        self._ping, self._farewell, self._checkpoint_seconds = ping, farewell, checkpoint_seconds
        self.ending: Ending | None = None
        self._group: Group | None = None
        self._seen: int | None = None  # frames of the group; None while it reads the log
        self._epoch = 0
        self._began = cursor
        self.delivered = -1  # the newest offset handed out
        self._target: int | None = seat.reach if cursor < seat.reach else None  # reaching it is catching up
        self._state: str | None = None  # the last backpressure sent to the client; None before the first look
        self._acked = seat.acked(cursor)  # as of the last look
        self._peaks: list[Pressure] = []  # backpressure that an ack ended since
        self._alarm = 0  # the log reaching this offset changes the state
        self._dirty = True  # something besides the log may have changed
        self._stopping: bool | HeadwaterError = False
        self._calm = False  # live, and nothing to look at but what the group publishes
        self._sent = False  # since the last tick
        self._sleeping: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        now = time.monotonic()
        self._checkpoint_at, self._checked_at, self._sent_at = now + checkpoint_seconds, now, now
        self._due_at = 0.0
        self.deliveries, self.page = 0, PAGE  # so many were handed out; so many are read at a time
        seat.hub.streams.add(self)

    @property
    def place(self) -> int | None:
        """Where it stands in the log; None while it reads a snapshot."""
        return self.cursor if self._snapshot is None else None

    @property
    def _here(self) -> int | str:
        """The id of a frame that is neither a change nor a row: a reader that comes back with it misses nothing."""
        return self.cursor if self._snapshot is None else f"s:{self._snapshot.place}"

    # --- from outside, in the loop -------------------------------------------------------------------------------

    def wake(self) -> None:
        """Look again."""
        if self._sleeping is not None and not self._sleeping.done():
            self._sleeping.set_result(None)

    def changed(self) -> None:
        """The subscription was acked, paused, resumed, moved or closed."""
        self._note_peak()
        self._dirty, self._calm = True, False
        self._due_at = 0.0
        self.wake()

    def stop(self, why: HeadwaterError | None = None) -> None:
        """The server goes away, or the reader may not stay: say good-bye, or why, and end."""
        self._stopping, self._calm = why or True, False
        self.wake()

    def leave(self) -> None:
        """The reader went away."""
        self._end("closed", "the reader left")
        self.wake()

    def refuse(self, code: str, message: str) -> None:
        """The reader did what it may not do."""
        self._end(code, message)
        self.wake()

    def is_due(self, now: float) -> bool:
        """Whether `tick` has anything to look at: with thousands of streams most of the time it has not."""
        return now >= self._due_at or self.seat.log.latest >= self._alarm

    def tick(self, now: float) -> None:
        """Time passed: look whether a checkpoint, a sign of life or a look at the lag is due."""
        if self._sent:
            self._sent, self._sent_at = False, now
        lagging = self.seat.log.latest >= self._alarm
        must_look = self.seat.must_look
        looking = lagging or (must_look and now - self._checked_at >= CHECK_SECONDS)
        if looking:
            self._dirty, self._checked_at = True, now
        if looking or now >= self._checkpoint_at or now - self._sent_at >= PING_SECONDS:
            self._calm = False
            self.wake()
        self._move_on()
        self._note_quiet()
        self._acked = self.seat.acked(self.cursor)
        patience = CHECK_SECONDS if must_look else PING_SECONDS
        self._due_at = min(max(self._checkpoint_at, now), self._sent_at + PING_SECONDS, now + patience)

    def close(self) -> None:
        """Give everything back."""
        self._move_on()
        self._leave()
        self.seat.hub.streams.discard(self)
        if self._loose is not None:
            self._loose.close()
        self._note_quiet()

    # --- the reader's side ---------------------------------------------------------------------------------------

    def ready(self) -> bytes | None:
        """The short cut of a live stream: what was published and not yet taken; None when `next` must be asked."""
        group, hub = self._group, self.seat.hub
        if not self._calm or group is None or self._seen is None or self._epoch != hub.epoch or not group.is_live:
            return None
        taken = group.take(self._seen)
        if taken is None:
            return None
        if not taken.piece:
            self.cursor = hub.reached(group.view)
            return b""
        self.deliveries += taken.seen - self._seen
        self.delivered = taken.offset
        self._seen = taken.seen
        self.cursor = hub.reached(group.view) if taken.seen == group.published else taken.offset
        self._sent = True
        return taken.piece

    def news(self) -> asyncio.Future[None]:
        """To be awaited after `ready` had nothing: done when it is worth asking again."""
        if self._group is not None:
            self._group.waiting.add(self)
        self._sleeping = self._loop.create_future()
        return self._sleeping

    async def next(self) -> bytes | None:
        """The next frames; None at the end."""
        while True:
            try:
                piece = await self._next_live() if self._calm else await self._step()
            except Exception as error:
                piece = self._fail(known(error))
            if piece:
                self._sent = True
                return piece
            if self.ending is not None:
                return None

    async def _next_live(self) -> bytes:
        """What the group published, or sleep until it does. Anything else ends the calm."""
        while (piece := self.ready()) is not None:
            if piece:
                return piece
            await self.news()
        self._calm = False
        return b""

    async def _step(self) -> bytes:
        if isinstance(self._stopping, HeadwaterError) and self.ending is None:
            raise self._stopping
        if self._stopping and self.ending is None:
            self._end("stopping", "the server is stopping")
            return self._due_checkpoint(last=True) + self._farewell
        if self.ending is not None:
            return b""
        if self._dirty:
            control = self._control()
            if control or self._is_over():
                return control
        if self.seat.paused:
            return await self._sleep()
        if self._snapshot is not None:
            return await self._rows(self._snapshot)
        if self._upto is not None and self.cursor >= self._upto:
            self._end("complete", "everything asked for was sent")
            return b""
        return await self._live() if self._seen is not None else await self._catch_up()

    # --- live ----------------------------------------------------------------------------------------------------

    async def _live(self) -> bytes:
        group, hub = self._group, self.seat.hub
        assert group is not None and self._seen is not None
        if not group.is_live or self._epoch != hub.epoch:
            return self._fall_back()
        taken = group.take(self._seen)
        if taken is None:
            return self._fall_back()
        if taken.piece:
            self._calm = True
            piece = await self._next_live() + self._caught_up() + self._due_checkpoint()
            self._calm = self._calm and self._target is None
            return piece
        self.cursor = hub.reached(group.view)
        due = self._caught_up() or self._due_checkpoint() or self._due_ping()
        self._calm = not due
        return due

    def _move_on(self) -> None:
        """Over what was published while it slept: it would have been woken if any of that passed."""
        group, hub = self._group, self.seat.hub
        if group is not None and group.is_live and self._epoch == hub.epoch and self._seen == group.published:
            self.cursor = max(self.cursor, hub.reached(group.view))

    def _fall_back(self) -> bytes:
        """Too slow for what is held in memory, or the group failed: from here on the log is read."""
        group, seen = self._group, self._seen
        assert group is not None and seen is not None
        if not group.is_dismissed or not group.holds(seen):
            self._target = self._target or self.seat.hub.upto
        self._seen = None
        return b""

    # --- catching up ---------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        if self._group is not None:
            self.seat.hub.leave(self._group)
            self._group.waiting.discard(self)
            self._group = None

    async def _catch_up(self) -> bytes:
        seat = self.seat
        if seat.hub.is_far(seat.view, self.cursor) and (self._group is None or self._group.failed is None):
            self._leave()  # nothing need be published for who would not take it
            return await self._read(min(seat.log.latest, self._upto or seat.log.latest))
        if self._group is None or self._group.is_dismissed:
            self._leave()
            self._group = seat.hub.join(seat.view, self._frame)
        failed = self._group.failed
        if failed is not None and self.cursor >= seat.published:  # what came before it was delivered
            return self._fail(failed)
        if self._group.is_live and not seat.must_cut(self.cursor) and self._upto is None:
            if self.cursor > seat.published:
                seat.hub.sleep(self)  # the hub has not come that far
                return await self._sleep()
            self._seen, self._epoch = self._group.seek(self.cursor), seat.hub.epoch
            if self._seen is not None:
                return b""
        upto = seat.readable
        return await self._read(min(upto, self._upto or upto))

    async def _read(self, upto: int) -> bytes:
        seat = self.seat
        if upto <= self.cursor:
            seat.hub.sleep(self)
            return self._caught_up() or self._due_checkpoint() or await self._sleep()
        try:
            page: Piece = await seat.read(self._piece, upto)
        except OffsetExpired:
            self._dirty = True
            return b""
        if page.upto == self.cursor:
            self._dirty = True  # the log was withdrawn under us: look whether we are lost
            await asyncio.sleep(0.05)
            return b""
        self.cursor = page.upto
        if page.changes:
            self.deliveries, self.delivered = self.deliveries + page.changes, page.last
        if page.ts and time.monotonic() >= self._checkpoint_at:
            return page.data + self._checkpoint(page.ts, page.upto)
        return page.data

    def _piece(self, upto: int) -> Piece:
        seat, at = self.seat, self.cursor
        cut = seat.cut(at)
        return read_piece(seat.log, seat.view, self._frame, after=at, upto=upto, limit=self.page, most=PIECE, cut=cut)

    def _caught_up(self) -> bytes:
        if self._target is None or self.cursor < self._target:
            return b""
        self._target = None
        body = {"offset": self.cursor, "latest_offset": self.seat.log.latest}
        return self._frame(self.cursor, "caught_up", _encode(self.seat.named(body)))

    # --- snapshot ------------------------------------------------------------------------------------------------

    async def _rows(self, snapshot: SnapshotReader) -> bytes:
        page = await self.seat.run(snapshot.page, PAGE, PIECE)
        frames = []
        if page.restarted:
            body = {"reason": page.reason}
            frames.append(self._frame(f"s:{page.began}", "snapshot_restart", _encode(self.seat.named(body))))
        frames += [self._frame(f"s:{cursor}", "insert", data) for cursor, data in page.rows]
        self.deliveries += len(page.rows)
        if page.done:
            self._snapshot = None
            self.cursor = self._began = page.offset
            self._target = self.seat.reach
            body = {"offset": page.offset, "rows": page.sent}
            frames.append(self._frame(page.offset, "snapshot_end", _encode(self.seat.named(body))))
        return b"".join(frames)

    # --- control -------------------------------------------------------------------------------------------------

    def _control(self) -> bytes:
        self._dirty = False
        self._move_on()
        seat = self.seat
        if seat.closed:
            self._end("closed", "the subscription was closed")
            return b""
        peaks, self._peaks = self._peaks, []
        if self._snapshot is None and (reason := seat.why_lost(self.cursor)):
            lost = Pressure(RESNAPSHOT_REQUIRED, max(seat.log.latest - seat.acked(self.cursor), 0), 0, seat.paused)
            told = self._told([*peaks, lost])
            self._end("resnapshot_required", reason)
            return told + self._frame(seat.log.horizon - 1, "resnapshot", _encode(seat.resnapshot(reason)))
        self._skip_acked()
        found = seat.pressure_of_acks(self.cursor)
        self._alarm, self._acked = seat.alarm(), seat.acked(self.cursor)
        return self._told([*peaks, found])

    def _told(self, states: list[Pressure]) -> bytes:
        """A frame for each state that is not healthy and another than the one before, those in between included."""
        frames = []
        for found in states:
            for each in [*self.seat.states_between(self._state, found), found]:
                if each.state not in (self._state, HEALTHY):
                    frames.append(self._frame(self._here, "backpressure", _encode(self.seat.backpressure(each))))
                self._state = each.state
        return b"".join(frames)

    def _note_peak(self) -> None:
        """An ack may end a state that nobody has looked at yet."""
        if self._state is not None and self._snapshot is None and self.seat.acked(self.cursor) != self._acked:
            self._peaks.append(self.seat.pressure_at(self._acked))
        self._acked = self.seat.acked(self.cursor)

    def _skip_acked(self) -> None:
        """What was acked by another way meanwhile is not delivered any more."""
        held = self.seat.subscription
        if held is not None and self._snapshot is None and held.acked > self.cursor:
            self.cursor, self._seen = held.acked, None
            self._began = held.acked  # nobody looked at what was skipped

    def _due_checkpoint(self, *, last: bool = False) -> bytes:
        """The hub's checkpoint, if one is due and everything before it was handed out."""
        if not last and time.monotonic() < self._checkpoint_at:
            return b""
        group = self._group
        if group is None or (self._seen is not None and self._seen != group.published):
            return b""
        if self._seen is None and self.cursor != self.seat.hub.upto:
            return b""  # it reads the log by itself, and has not come that far
        if self._seen is not None and (self._epoch != self.seat.hub.epoch or not group.is_live):
            return b""  # the hub went on without its group
        found = self.seat.hub.checkpoint()
        return b"" if found is None else self._checkpoint(*found)

    def _checkpoint(self, ts: int, offset: int) -> bytes:
        self._checkpoint_at = time.monotonic() + self._checkpoint_seconds
        return self._frame(offset, "checkpoint", _encode({"ts": ts_text(ts), "offset": offset}))

    def _fail(self, error: HeadwaterError) -> bytes:
        self._end(error.code, error.message, error)
        body = {"code": error.code, "message": error.message, "details": error.details}
        return self._frame(self._here, "failed", _encode(self.seat.named(body)))

    def _end(self, code: str, message: str, error: HeadwaterError | None = None) -> None:
        self._calm = False
        if self.ending is None:
            self.ending = Ending(code, message, error)

    def _is_over(self) -> bool:
        return self.ending is not None

    # --- waiting -------------------------------------------------------------------------------------------------

    async def _sleep(self) -> bytes:
        """Until woken; the answer is a sign of life when one is due."""
        self._sleeping = self._loop.create_future()
        try:
            await self._sleeping
        finally:
            self._sleeping = None
        return self._due_ping()

    def _due_ping(self) -> bytes:
        now = time.monotonic()
        if self._sent or now - self._sent_at < PING_SECONDS:
            return b""
        self._sent_at = now
        return self._ping

    def _note_quiet(self) -> None:
        """Nothing since the acked cursor concerned the subscriber: it need not be looked at again."""
        if self._snapshot is None:
            self.seat.note_quiet(self._began, self.delivered, self.cursor)
