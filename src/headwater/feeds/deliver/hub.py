"""The hub: one tail of one log, each change encoded and framed once, whoever reads it.

    log ──recent──> pump ──router──> group (filter, shape, framing) ──joined frames──> streams at their cursors

A stream is a cursor, not a queue. What is published stays in memory for a short while, bounded for all
groups together; a stream that was too slow for that reads the log again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from time import perf_counter, thread_time
from typing import Any

from headwater.errors import HeadwaterError, OffsetExpired
from headwater.feeds.filters.filter import Filter
from headwater.feeds.filters.filter_router import Router
from headwater.feeds.formats.encoder import Encoder
from headwater.feeds.formats.frame import Frame
from headwater.feeds.formats.registry import encoder
from headwater.feeds.groups.group import Group, Sleeper
from headwater.feeds.groups.hub_batch import LONGEST_SECONDS, Batch, Costly, Decided, Found, bounded
from headwater.feeds.groups.log_reader import View, signature_of
from headwater.feeds.options import Options, Shape
from headwater.feeds.query_feeds.invalidation import Invalidations, invalidations
from headwater.feeds.query_feeds.query_groups import Frames, QuestionGroups, Steady, steady_at
from headwater.feeds.query_feeds.query_instances import Question
from headwater.feeds.query_feeds.query_view import QueryView
from headwater.feeds.query_feeds.relevant_changes import schema_changes, transaction_of
from headwater.log.live.live_log import LiveLog
from headwater.model.bounded_cache import BoundedCache
from headwater.model.change import Transaction
from headwater.model.table import Table
from headwater.model.work.work_context import shared_context
from headwater.sources.read import Look, Readable

logger = logging.getLogger("headwater.feeds")

BATCH, BATCH_BYTES = 1024, 4 << 20  # changes, and about how many bytes, routed before the streams get to write
NEVER = 2**63 - 1
KEPT_FRAMES = 16_384  # of all groups together
KEPT_BYTES = 16 << 20
FEW, APART = 4, 256  # up to so many streams each read the log by themselves when they are so many changes behind
TURN_SECONDS = 0.005  # of publishing, after which others in the loop have their turn
SHARE_SECONDS = 0.025  # of a core, that a filter may take of the loop for one batch before a thread decides for it
ENCODERS, VIEWS = 1024, 4096  # kept for the next reader who wants the same

Run = Callable[..., Any]  # runs a blocking call in a thread; awaitable


class Hub:
    """The live side of one database. Everything here runs in the loop but where it says otherwise."""

    def __init__(self, log: LiveLog, source: Readable, run: Run, questions: QuestionGroups | None = None) -> None:
        self._log, self._source, self._run, self._questions = log, source, run, questions
        self._loop = asyncio.get_running_loop()
        self._groups: dict[Hashable, Group] = {}
        self._waiting: set[Sleeper] = set()  # for the next batch, whatever is in it
        self._router: Router[Group] = Router()
        self._encoders: BoundedCache[Shape, Encoder] = BoundedCache(ENCODERS, ENCODERS)
        self._invalidations: BoundedCache[Shape, Invalidations] = BoundedCache(ENCODERS, ENCODERS)
        self._views: OrderedDict[bytes, View] = OrderedDict()
        self.streams: set[Sleeper] = set()  # all that are open, also those that read the log by themselves
        self._shapes: dict[str, Table] = {}  # of tables as they were published last
        self._kept: deque[Group] = deque()  # one entry per frame held, oldest first
        self._kept_bytes = 0
        self._asked = False  # a wake-up is on its way to the loop; touched by both sides, at worst once too often
        self._news = asyncio.Event()
        self.upto = self._routed = log.latest  # everything at or below was published; is being published
        self._whole = self.upto  # where the last whole transaction ends that was published
        self.ts = 0  # of the transaction that ends at `upto`; 0 in the midst of one
        self._schema: int | None = None  # its number when a question was last understood, where that must be asked for
        self._promised = 0  # the time of the newest checkpoint: none goes back
        self.epoch = 0  # raised when continuity broke: every stream reads the log again
        log.add_listener(self._tell)
        self._task = self._loop.create_task(self._pump(), context=shared_context())

    async def close(self) -> None:
        """Stop publishing."""
        self._log.remove_listener(self._tell)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _tell(self) -> None:
        """In the capture thread: something was staged."""
        if not self._asked:
            self._asked = True
            self._loop.call_soon_threadsafe(self._news.set)

    # --- groups ----------------------------------------------------------------------------------------------

    def reached(self, view: View) -> int:
        """How far was published what `view` shows."""
        return self._whole if view.is_whole else self.upto

    def view(self, options: Options, question: Question | None = None, held: frozenset[str] | None = None) -> View:
        """The view of `options`: compiled once, and its encoder shared with all others of the same shape.

        Options that name a query come with the question as it is understood now, and with the tables that their readers
        are held to: readers with other scopes have another view.
        """
        signature = signature_of(options, held)
        found = self._views.get(signature)
        if found is None:
            made = self._view(options) if question is None else self._query_view(options, question, held)
            found = self._views[signature] = made
            if len(self._views) > VIEWS:
                self._views.popitem(last=False)
        else:
            self._views.move_to_end(signature)
        if question is not None and isinstance(found, QueryView) and self._questions is not None:
            found.understood(question)
            self._questions.understood(question)
        return found

    def _view(self, options: Options) -> View:
        return View(options, self._source, self._encoder(options.shape))

    def _query_view(self, options: Options, question: Question, held: frozenset[str] | None) -> View:
        assert self._questions is not None
        made = self._invalidations.get(options.shape)
        if made is None:
            made = invalidations(options.shape)
            self._invalidations.put(options.shape, made)
        confirming = self._questions.confirming(question.key) if options.confirm else None
        return QueryView(options, self._source, question, made, confirming, held)

    def _encoder(self, shape: Shape) -> Encoder:
        made = self._encoders.get(shape)
        if made is None:
            made = encoder(shape, self._source)
            self._encoders.put(shape, made)
        return made

    def join(self, view: View, frame: Frame) -> Group:
        """Become a member of the group of `view` and `frame`. Its frames begin after `upto`."""
        if not self._groups:
            # Nobody listened: what was committed meanwhile need not be published.
            self.upto, self.ts = self._log.latest, 0
            self._routed = self._whole = self.upto
        key = (view.signature, frame)
        group = self._groups.get(key)
        if group is None:
            # What is published is a whole transaction there: such a group begins where one ends, at the log's head.
            since = self._log.latest if view.is_whole else 0
            group = self._groups[key] = Group(view, frame, max(self.upto, self._routed, since))
            if view.is_slow:
                self._eject(group)
            elif isinstance(view, QueryView) and self._questions is not None:
                self._questions.add(group, view)
            else:
                self._router.add(group, view.filter)
        group.members += 1
        return group

    def leave(self, group: Group) -> None:
        """Be a member no more."""
        group.members -= 1
        if not group.members:
            self._forget(group)

    def _forget(self, group: Group) -> None:
        """Publish nothing to it any more. One that failed was forgotten then, and another may have its place."""
        key = (group.view.signature, group.frame)
        if self._groups.get(key) is group:
            self._unroute(group)
            del self._groups[key]

    def _unroute(self, group: Group) -> None:
        self._router.remove(group)
        if self._questions is not None:
            self._questions.remove(group)

    def is_far(self, view: View, cursor: int) -> bool:
        """Whether a reader at `cursor` is so far behind that what is published now would be forgotten before it comes
        to it: then it need not be published. Where few read, that is sooner: pages of the log cost less than changes
        that are routed and kept one by one. Who sees whole transactions only is always taken along."""
        return (
            self._log.latest - cursor > (min(APART, KEPT_FRAMES) if self._is_few else KEPT_FRAMES) and not view.is_whole
        )

    @property
    def _is_few(self) -> bool:
        streams, groups = len(self.streams), self._groups
        # Those who wait without taking anything, as polls do, are members too: they gain by what is published.
        return max(streams, len(groups)) <= FEW and sum([each.members for each in groups.values()]) <= streams

    def sleep(self, sleeper: Sleeper) -> None:
        """Wake `sleeper` when the next batch was published."""
        self._waiting.add(sleeper)

    # --- publishing ------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            self._asked = False
            try:
                while self._groups and self.upto < self._log.latest:
                    await self._turn()
            except OffsetExpired:
                self._begin_anew()
            except Exception:
                logger.exception("publishing failed")
                self._begin_anew()

    async def _turn(self) -> None:
        """Publish one batch, and let the streams write it."""
        if self._is_few and self._log.latest - self.upto > APART:
            self._dismiss_all()
            if not self._groups:
                return
        parts = await self._next()
        await self._learn(parts)
        if parts and parts[0].first == self.upto + 1:  # else all left and others came meanwhile
            await self._publish(parts)
        await asyncio.sleep(0)  # the streams write

    async def _next(self) -> list[Transaction]:
        upto = min(self._log.latest, self.upto + BATCH)
        parts = self._log.recent(self.upto, upto)
        if parts is None:  # a huge transaction went past memory
            parts = await self._run(self._read, self.upto, upto)
        return bounded(parts, BATCH_BYTES)

    async def _learn(self, parts: list[Transaction]) -> None:
        """Compile every filter for table shapes that are new, in a thread: thousands would hold up the loop."""
        shapes = [change.table for part in parts for change in part.changes]
        for table in {id(table): table for table in shapes}.values():
            known = self._shapes.get(table.name)
            if known is not table:
                self._shapes[table.name] = table
                if known != table:
                    filters = [group.view.filter for group in self._groups.values()]
                    await self._run(_warm, table, [each for each in filters if each.wants(table.name)])
        if self._questions:
            if await self._has_schema_moved():
                self._questions.outdate()
            for group, error in (await self._questions.refresh(max(map(schema_changes, parts), default=-1))).items():
                self._fail(group, error)

    async def _has_schema_moved(self) -> bool:
        """Whether questions may mean something else though no change tells so.

        Of a database that is seen at a glance every change of the schema is in the log; others are asked.
        """
        source = self._source
        if source.glance() is not None:
            return False
        with contextlib.suppress(HeadwaterError):
            found: Look = await self._run(source.look)
            known, self._schema = self._schema, found.schema
            return known != found.schema
        return False

    def _read(self, after: int, upto: int) -> list[Transaction]:
        return self._log.read(after=after, upto=upto)

    def _begin_anew(self) -> None:
        """Continuity with what was published is lost: every stream goes back to the log and finds out."""
        self.epoch += 1
        self.upto, self.ts = self._log.latest, 0
        self._routed = self._whole = self.upto
        if self._questions is not None:
            self._questions.begin_anew()
        for group in self._groups.values():
            group.since = self.upto if group.is_live else NEVER
            group.wake()
        self._wake_waiting()

    async def _publish(self, parts: list[Transaction]) -> None:
        """Route, decide, encode and frame `parts`, and hand them to their groups."""
        batch = Batch(parts)
        before, self._routed = self.upto, parts[-1].upto  # a group that joins from now on begins behind this
        decided = await self._decide(batch)
        steady = await self._steady(parts[-1].upto)
        frames_of = await self._encode(batch, decided)
        if self.upto != before:
            self._wake_waiting()
            return  # all left and others came meanwhile, or continuity broke
        self.upto, self.ts = parts[-1].upto, parts[-1].ts if parts[-1].last else 0
        self._whole = self.upto if parts[-1].last else max(self._whole, transaction_of(parts[-1]) - 1)
        passing: dict[Group, Found] = {}  # of questions
        for group, found in decided.items():
            if not group.is_live:
                continue  # its members read the log
            if isinstance(found, HeadwaterError):
                self._fail(group, found)
            elif found is None:
                self._eject(group)
            elif group.view.is_whole:
                passing[group] = found
            elif group in frames_of:
                self._hand(group, *frames_of[group])
            elif found:
                self._kept_bytes -= group.skip(self.upto)
        for group, frames in {} if self._questions is None else self._questions.frames(batch, passing, steady).items():
            self._hand(group, frames, _size(frames))
        self._bound()
        self._wake_waiting()

    async def _decide(self, batch: Batch) -> dict[Group, Decided]:
        """Return what of `batch` goes to each group it may concern."""
        decided: dict[Group, Decided] = {}
        costly: list[tuple[Group, list[int]]] = []
        began, last = perf_counter(), thread_time()
        for group, places in self._routed_to(batch).items():
            if not batch.is_cheap(group, places):
                costly.append((group, places))
                continue
            decided[group] = batch.decide(group, places)
            now = thread_time()
            if now - last > SHARE_SECONDS:
                group.view.is_costly = True
            if perf_counter() - began > TURN_SECONDS:
                await asyncio.sleep(0)
                began, now = perf_counter(), thread_time()
            last = now
        return decided | await self._decide_costly(batch, costly)

    async def _encode(self, batch: Batch, decided: dict[Group, Decided]) -> dict[Group, tuple[Frames, int]]:
        """Return the frames of `batch` for each group and their bytes, no more than are kept: other groups skip them.

        Nothing is handed out here: a stream that sees a new `upto` must find all frames up to it.
        """
        made: dict[Group, tuple[Frames, int]] = {}
        count = size = 0
        began = perf_counter()
        for group, found in decided.items():
            if not isinstance(found, list) or not found or group.view.is_whole:
                continue
            frames = batch.frames(group, found)
            bytes_ = _size(frames)
            count, size = count + len(frames), size + bytes_
            if made and (count > KEPT_FRAMES or size > KEPT_BYTES):
                break
            made[group] = frames, bytes_
            self._bound(count, size)
            if perf_counter() - began > TURN_SECONDS:
                await asyncio.sleep(0)
                began = perf_counter()
        return made

    async def _decide_costly(self, batch: Batch, groups: list[tuple[Group, list[int]]]) -> dict[Group, Decided]:
        """Decide in a thread. A filter that takes too long is left to itself there, and the others go on in another."""
        decided: dict[Group, Decided] = {}
        while groups:
            costly = Costly(batch, groups)
            work = asyncio.ensure_future(self._run(costly.run))
            work.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to ask
            while not work.done() and not costly.is_late:
                await asyncio.wait({work}, timeout=LONGEST_SECONDS / 2)
            if work.done():
                work.result()
            found, groups = costly.stop()
            decided |= found
        return decided

    async def _steady(self, upto: int) -> Steady:
        """Whose answers are known to be what they were; only who has guards has to be asked, and may take a while."""
        guarded = self._questions.guarded() if self._questions else {}
        return await self._run(steady_at, guarded, upto) if guarded else {}

    def _routed_to(self, batch: Batch) -> dict[Group, list[int]]:
        found = self._router.route(batch.changes)
        return found | self._questions.route(batch) if self._questions else found

    def _hand(self, group: Group, frames: Frames, size: int) -> None:
        self._kept.extend([group] * len(frames))
        self._kept_bytes += size
        group.publish(frames)

    def _fail(self, group: Group, error: HeadwaterError) -> None:
        self._forget(group)  # before it is told: whoever comes from now on begins afresh
        group.fail(error)

    def _eject(self, group: Group) -> None:
        """Its filter takes too long for a place among the others: each of its streams reads the log by itself."""
        group.view.is_slow = True
        self._unroute(group)
        group.is_live, group.since = False, NEVER
        group.wake()

    def _dismiss_all(self) -> None:
        for group in [group for group in self._groups.values() if group.is_live and not group.view.is_whole]:
            self._dismiss(group)
        self._wake_waiting()

    def _dismiss(self, group: Group) -> None:
        """Let its streams read the log by themselves, until they have caught up and come back."""
        self._forget(group)
        group.is_live, group.is_dismissed = False, True
        group.wake()

    def _wake_waiting(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for sleeper in waiting:
            sleeper.wake()

    def _bound(self, coming: int = 0, coming_bytes: int = 0) -> None:
        """Drop the oldest frames, until the others and those that are coming are no more than are kept."""
        most, most_bytes = KEPT_FRAMES - coming, KEPT_BYTES - coming_bytes
        while self._kept and (len(self._kept) > most or self._kept_bytes > most_bytes):
            group = self._kept.popleft()
            self._kept_bytes -= group.forget_oldest()
            if group.is_unread and group.is_live and not group.view.is_whole:
                self._dismiss(group)
                self._kept_bytes -= group.clear()

    def checkpoint(self) -> tuple[int, int] | None:
        """A time and an offset: nothing at or below that time comes after that offset. None in mid-transaction."""
        ts, offset = self._log.closed
        if offset == self.upto:
            self._promised = max(self._promised, ts)
        elif not self.ts:
            return None
        # The log may be ahead of us, and closed there: what was promised for here holds still.
        self._promised = max(self._promised, self.ts)
        return (self._promised, self.upto) if self._promised else None


def _size(frames: Frames) -> int:
    return len(frames[0][1]) if len(frames) == 1 else sum([len(frame) for _, frame in frames])


def _warm(table: Table, filters: list[Filter]) -> None:
    """In a thread: what is compiled now need not be compiled in the loop."""
    for each in filters:
        with contextlib.suppress(HeadwaterError):  # it ends its own feed when it is asked
            each.interest(table)
