"""One open stream of a feed: the loop around the states of stream_state.py."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from headwater.errors import HeadwaterError, OffsetExpired
from headwater.feeds.deliver.backpressure import HEALTHY, RESNAPSHOT_REQUIRED, Pressure, states_between
from headwater.feeds.deliver.catch_up_page import Piece, read_piece
from headwater.feeds.deliver.consumer import Consumer
from headwater.feeds.deliver.end_reason import CLOSED, EndReason, known
from headwater.feeds.deliver.stream_request import Transport
from headwater.feeds.deliver.stream_state import (
    Action,
    Advanced,
    CatchingUp,
    Closed,
    Completed,
    Ended,
    Event,
    Failed,
    FellBehind,
    HistoryLost,
    Joined,
    Live,
    PauseChanged,
    Paused,
    Skipped,
    SnapshotSent,
    Snapshotting,
    State,
    Stopped,
    next_state,
)
from headwater.feeds.groups.group import PIECE, Group
from headwater.feeds.snapshot import SnapshotReader
from headwater.model.change import Op
from headwater.model.clock import ts_text
from headwater.model.control_events import ControlEvent

PAGE = 1024  # changes in one page of catch-up
CHECK_SECONDS = 1.0  # between two checks whether changes were evicted, where retention is by age
MAX_PEAKS = 64  # changes of the backpressure state that a stream keeps until they are sent; later repeats are dropped
PING_SECONDS = 15.0  # proxies cut a silent connection after 30 to 60
_encode = msgspec.json.Encoder().encode


class Stream:
    """Yields frames until it ends. Owned by one task; other tasks of the same loop may call `wake` and `tick`."""

    def __init__(
        self,
        consumer: Consumer,
        opening: Transport,
        *,
        cursor: int,
        snapshot: SnapshotReader | None = None,
        upto: int | None = None,
        checkpoint_seconds: float,
    ) -> None:
        self.consumer, self._frame, self.cursor = consumer, opening.frame, cursor
        self._snapshot, self._upto = snapshot, upto  # the snapshot until its last row was sent
        self._own_snapshot = snapshot if consumer.subscription is None else None  # to be closed with the stream
        self._ping, self._farewell, self._checkpoint_seconds = opening.ping, opening.farewell, checkpoint_seconds
        catching_up = CatchingUp(consumer.reach if cursor < consumer.reach else None)
        self.state: State = catching_up if snapshot is None else Snapshotting()
        self._group: Group | None = None
        self._began = cursor
        self.delivered = -1  # the newest offset delivered
        self._reported: str | None = None  # the last backpressure state sent; None before the first check
        self._acked = consumer.acked(cursor)  # as of the last check
        self._peaks: list[Pressure] = []  # backpressure states that an ack ended before they were reported
        self._alarm = 0  # when the log reaches this offset, the backpressure state changes
        self._dirty = True  # the subscription or its backpressure must be checked
        self._stop: Stopped | Failed | None = None  # asked for from outside
        self._calm = False  # live, and nothing is due but the frames that the group publishes
        self._sent = False  # since the last tick
        self._sleeping: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        now = time.monotonic()
        self._checkpoint_at, self._checked_at, self._sent_at = now + checkpoint_seconds, now, now
        self._due_at = 0.0
        self.deliveries, self.page = 0, PAGE  # changes and rows delivered; changes to read at a time
        consumer.hub.streams.add(self)

    @property
    def ending(self) -> EndReason | None:
        """Return why the stream has ended; None while it goes on."""
        return self.state.ending if isinstance(self.state, Ended) else None

    @property
    def _live(self) -> Live | None:
        """Return the state Live, also while it is paused; else None."""
        state = self.state.held if isinstance(self.state, Paused) else self.state
        return state if isinstance(state, Live) else None

    @property
    def log_offset(self) -> int | None:
        """Return the stream's offset in the log; None while it sends rows of a snapshot."""
        return self.cursor if self._snapshot is None else None

    @property
    def _here(self) -> int | str:
        """Return the id for a control event's frame: a client that resumes from it misses nothing."""
        return self.cursor if self._snapshot is None else f"s:{self._snapshot.cursor}"

    # --- transitions ---------------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> bytes:
        """Move to the next state; return the frames to send."""
        self._advance()
        state, actions = next_state(self.state, event)
        frames = b"".join([self._act(action, state) for action in actions])  # as of the state before
        self.state, self._calm = state, False
        return frames

    def _act(self, action: Action, state: State) -> bytes:
        match action:
            case Action.SEND_CAUGHT_UP:
                body = {"offset": self.cursor, "latest_offset": self.consumer.log.latest}
                return self._control(ControlEvent.CAUGHT_UP, body)
            case Action.SEND_LAST_CHECKPOINT:
                return self._due_checkpoint(last=True)
            case Action.SEND_FAREWELL:
                return self._farewell
        assert isinstance(state, Ended)
        if action is Action.SEND_RESNAPSHOT:
            body = self.consumer.resnapshot(state.ending.message)
            return self._frame(self.consumer.log.horizon - 1, ControlEvent.RESNAPSHOT, _encode(body))
        error = state.ending.error
        assert error is not None
        return self._control(
            ControlEvent.FAILED, {"code": error.code, "message": error.message, "details": error.details}
        )

    def _control(self, event: ControlEvent, body: dict[str, Any], id: int | str | None = None) -> bytes:
        return self._frame(self._here if id is None else id, event, _encode(self.consumer.named(body)))

    # --- from outside, in the loop -------------------------------------------------------------------------------

    def wake(self) -> None:
        """End the stream's sleep."""
        if self._sleeping is not None and not self._sleeping.done():
            self._sleeping.set_result(None)

    def changed(self) -> None:
        """Check the subscription at the next step: it was acknowledged, paused, resumed, moved or closed."""
        self._note_peak()
        self._dirty, self._calm = True, False
        self._due_at = 0.0
        self.wake()

    def stop(self, why: HeadwaterError | None = None) -> None:
        """End the stream because the server stops, or because of `why`."""
        self._stop, self._calm = Stopped() if why is None else Failed(why), False
        self.wake()

    def leave(self) -> None:
        """End the stream because its reader left."""
        self.refuse(CLOSED, "the reader left")

    def refuse(self, code: str, message: str) -> None:
        """End the stream with `code` and `message`, which say how its reader broke the protocol."""
        self._apply(Closed(code, message))
        self.wake()

    def is_due(self, now: float) -> bool:
        """Return whether `tick` has work. Of thousands of streams most have none most of the time."""
        return now >= self._due_at or self.consumer.log.latest >= self._alarm

    def tick(self, now: float) -> None:
        """Wake the stream if a checkpoint, a ping or a check of its backpressure is due."""
        if self._sent:
            self._sent, self._sent_at = False, now
        lagging = self.consumer.log.latest >= self._alarm
        changes_with_time = self.consumer.changes_with_time
        checking = lagging or (changes_with_time and now - self._checked_at >= CHECK_SECONDS)
        if checking:
            self._dirty, self._checked_at = True, now
        if checking or now >= self._checkpoint_at or now - self._sent_at >= PING_SECONDS:
            self._calm = False
            self.wake()
        self._advance()
        self._note_quiet()
        self._acked = self.consumer.acked(self.cursor)
        patience = CHECK_SECONDS if changes_with_time else PING_SECONDS
        self._due_at = min(max(self._checkpoint_at, now), self._sent_at + PING_SECONDS, now + patience)

    def close(self) -> None:
        """Leave the hub, release the lease of a snapshot without a subscription, and record the quiet position."""
        self._advance()
        self._leave_group()
        self.consumer.hub.streams.discard(self)
        if self._own_snapshot is not None:
            self._own_snapshot.close()
        self._note_quiet()

    # --- frames --------------------------------------------------------------------------------------------------

    def ready(self) -> bytes | None:
        """Return published frames without waiting, b"" if there are none; None if `next` must be called instead."""
        group, hub, live = self._group, self.consumer.hub, self.state
        if not self._calm or group is None or type(live) is not Live or live.epoch != hub.epoch or not group.is_live:
            return None
        taken = group.take(live.seen)
        if taken is None:
            return None
        if not taken.piece:
            self.cursor = hub.reached(group.view)
            return b""
        self.deliveries += taken.seen - live.seen
        self.delivered = taken.offset
        live.seen = taken.seen
        self.cursor = hub.reached(group.view) if taken.seen == group.published else taken.offset
        self._sent = True
        return taken.piece

    def news(self) -> asyncio.Future[None]:
        """Return a future that is done when `ready` may have frames again. Call it after `ready` had none."""
        if self._group is not None:
            self._group.waiting.add(self)
        self._sleeping = self._loop.create_future()
        return self._sleeping

    async def next(self) -> bytes | None:
        """Return the next frames; None at the end."""
        while True:
            try:
                piece = await self._next_published() if self._calm else await self._step()
            except Exception as error:
                piece = self._apply(Failed(known(error)))
            if piece:
                self._sent = True
                return piece
            if self.ending is not None:
                return None

    async def _step(self) -> bytes:
        """Run one step of the current state; return the frames to send, b"" if there are none."""
        if self._stop is not None:
            return self._apply(self._stop)
        if self._dirty and (frames := self._check()):
            return frames
        if self.consumer.paused != isinstance(self.state, Paused):
            self._apply(PauseChanged(self.consumer.paused))
        match self.state:
            case Snapshotting():
                return await self._send_rows()
            case CatchingUp():
                return await self._catch_up()
            case Live():
                return await self._send_published(self.state)
            case Paused():
                return await self._sleep()
            case Ended():
                return b""

    # --- live ----------------------------------------------------------------------------------------------------

    async def _send_published(self, live: Live) -> bytes:
        group, hub = self._group, self.consumer.hub
        assert group is not None
        taken = group.take(live.seen) if group.is_live and live.epoch == hub.epoch else None
        if taken is None:  # too slow for what is kept in memory, or the group ended: read the log
            has_missed = not group.is_suspended or not group.holds(live.seen)
            return self._apply(FellBehind(hub.upto if has_missed else None))
        if taken.piece:
            self._calm = True
            piece = await self._next_published()
            calm = self._calm and live.target is None
            piece += self._apply(Advanced(self.cursor)) + self._due_checkpoint()
            self._calm = calm
            return piece
        self.cursor = hub.reached(group.view)
        due = self._apply(Advanced(self.cursor)) or self._due_checkpoint() or self._due_ping()
        self._calm = not due
        return due

    async def _next_published(self) -> bytes:
        """Return what the group publishes next; b"" as soon as anything else is due."""
        while (piece := self.ready()) is not None:
            if piece:
                return piece
            await self.news()
        self._calm = False
        return b""

    def _advance(self) -> None:
        """Move over what was published during a sleep: a frame for this stream would have woken it."""
        group, hub, live = self._group, self.consumer.hub, self._live
        if (
            group is not None
            and live is not None
            and group.is_live
            and live.epoch == hub.epoch
            and live.seen == group.published
        ):
            self.cursor = max(self.cursor, hub.reached(group.view))

    # --- catching up ---------------------------------------------------------------------------------------------

    def _leave_group(self) -> None:
        if self._group is not None:
            self.consumer.hub.leave(self._group)
            self._group.waiting.discard(self)
            self._group = None

    async def _catch_up(self) -> bytes:
        consumer, latest = self.consumer, self.consumer.log.latest
        if self._upto is not None and self.cursor >= self._upto:
            return self._apply(Completed())
        if consumer.hub.is_far(consumer.view, self.cursor) and (self._group is None or self._group.failed is None):
            self._leave_group()  # frames would be dropped before this stream comes to them
            return await self._read(latest if self._upto is None else min(latest, self._upto))
        if self._group is None or self._group.is_suspended:
            self._leave_group()
            self._group = consumer.hub.join(consumer.view, self._frame)
        failed = self._group.failed
        if failed is not None and self.cursor >= consumer.published:  # the changes before the failure were delivered
            return self._apply(Failed(failed))
        if self._group.is_live and not consumer.overlaps_snapshot(self.cursor) and self._upto is None:
            if self.cursor > consumer.published:
                consumer.hub.sleep(self)  # the hub has not published that far
                return await self._sleep()
            seen = self._group.seek(self.cursor)
            if seen is not None:
                return self._apply(Joined(seen, consumer.hub.epoch))
        readable = consumer.readable
        return await self._read(readable if self._upto is None else min(readable, self._upto))

    async def _read(self, upto: int) -> bytes:
        consumer = self.consumer
        if upto <= self.cursor:
            consumer.hub.sleep(self)
            return self._apply(Advanced(self.cursor)) or self._due_checkpoint() or await self._sleep()
        try:
            page: Piece = await consumer.read(self._piece, upto)
        except OffsetExpired:
            self._dirty = True
            return b""
        if page.upto == self.cursor:
            self._dirty = True  # the log was withdrawn: check whether the cursor is still in it
            await asyncio.sleep(0.05)
            return b""
        self.cursor = page.upto
        if page.changes:
            self.deliveries, self.delivered = self.deliveries + page.changes, page.last
        if page.ts and time.monotonic() >= self._checkpoint_at:
            return page.data + self._checkpoint(page.ts, page.upto)
        return page.data

    def _piece(self, upto: int) -> Piece:
        consumer, at = self.consumer, self.cursor
        limits = {"limit": self.page, "most": PIECE}
        return read_piece(
            consumer.log, consumer.view, self._frame, after=at, upto=upto, newer=consumer.snapshot_filter(at), **limits
        )

    # --- snapshot ------------------------------------------------------------------------------------------------

    async def _send_rows(self) -> bytes:
        assert self._snapshot is not None
        page = await self.consumer.run(self._snapshot.page, PAGE, PIECE)
        frames = []
        if page.restarted:
            frames.append(self._control(ControlEvent.SNAPSHOT_RESTART, {"reason": page.reason}, f"s:{page.began}"))
        frames += [self._frame(f"s:{cursor}", Op.INSERT.word, data) for cursor, data in page.rows]
        self.deliveries += len(page.rows)
        if page.done:
            self._snapshot = None
            self.cursor = self._began = page.offset
            body = {"offset": page.offset, "rows": page.sent}
            frames.append(self._control(ControlEvent.SNAPSHOT_END, body))
            self._apply(SnapshotSent(self.consumer.reach))
        return b"".join(frames)

    # --- the subscription and its backpressure -------------------------------------------------------------------

    def _check(self) -> bytes:
        """Check what happened to the subscription and to the log; return the control frames to send."""
        self._dirty = False
        self._advance()
        consumer = self.consumer
        if consumer.closed:
            return self._apply(Closed(CLOSED, "the subscription was closed"))
        peaks, self._peaks = self._peaks, []
        if self._snapshot is None and (reason := consumer.why_lost(self.cursor)):
            lost = Pressure(
                RESNAPSHOT_REQUIRED, max(consumer.log.latest - consumer.acked(self.cursor), 0), 0, consumer.paused
            )
            return self._backpressure([*peaks, lost]) + self._apply(HistoryLost(reason))
        self._skip_acked()
        found = consumer.pressure_of_acks(self.cursor)
        self._alarm, self._acked = consumer.alarm(), consumer.acked(self.cursor)
        return self._backpressure([*peaks, found])

    def _backpressure(self, states: list[Pressure]) -> bytes:
        """Return a frame for each change to a state that is not healthy, states in between included."""
        frames = []
        for found in states:
            for each in [*states_between(self._reported, found, self.consumer.limits), found]:
                if each.state not in (self._reported, HEALTHY):
                    body = self.consumer.backpressure(each)
                    frames.append(self._frame(self._here, ControlEvent.BACKPRESSURE, _encode(body)))
                self._reported = each.state
        return b"".join(frames)

    def _note_peak(self) -> None:
        """Keep the state before an ack: the ack may end a state that was not reported yet."""
        if self._reported is not None and self._snapshot is None and self.consumer.acked(self.cursor) != self._acked:
            peak, states = self.consumer.pressure_at(self._acked), [self._reported, *[one.state for one in self._peaks]]
            if peak.state != states[-1] and (len(self._peaks) < MAX_PEAKS or peak.state not in states):
                self._peaks.append(peak)
        self._acked = self.consumer.acked(self.cursor)

    def _skip_acked(self) -> None:
        """Skip the changes that the subscriber acknowledged by another connection or call."""
        subscription = self.consumer.subscription
        if subscription is not None and self._snapshot is None and subscription.acked > self.cursor:
            self.cursor = subscription.acked
            self._began = subscription.acked  # the stream did not see what it skipped
            self._apply(Skipped())

    def _note_quiet(self) -> None:
        """Record up to where no change passed the filter, so that the log is not read there again."""
        if self._snapshot is None:
            self.consumer.note_quiet(self._began, self.delivered, self.cursor)

    # --- checkpoints, pings and sleep ----------------------------------------------------------------------------

    def _due_checkpoint(self, *, last: bool = False) -> bytes:
        """Return the hub's checkpoint, if one is due and everything before it was sent."""
        if not last and time.monotonic() < self._checkpoint_at:
            return b""
        group, live, hub = self._group, self._live, self.consumer.hub
        if group is None:
            return b""
        if live is None and self.cursor != hub.upto:
            return b""  # the stream reads the log and is not where the hub is
        if live is not None and (live.seen != group.published or live.epoch != hub.epoch or not group.is_live):
            return b""  # not all was taken, or the hub went on without the group
        found = hub.checkpoint()
        return b"" if found is None else self._checkpoint(*found)

    def _checkpoint(self, ts: int, offset: int) -> bytes:
        self._checkpoint_at = time.monotonic() + self._checkpoint_seconds
        return self._frame(offset, ControlEvent.CHECKPOINT, _encode({"ts": ts_text(ts), "offset": offset}))

    async def _sleep(self) -> bytes:
        """Sleep until woken; return a ping if one is due."""
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
