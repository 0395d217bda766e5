"""One change feed over a log that the test controls: pages, pace, and every way in which it ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tests.feeds.feed_database import ITEMS, NAMES, Fed, insert, name

from headwater.errors import HeadwaterError, NotFound, NotSupported, OffsetExpired, Unavailable
from headwater.model.change import Change, Op, Transaction
from headwater.model.keys.key import Span, encode_key
from headwater.model.table import Column, Table
from headwater.ranges.changefeed.catch_up_limits import CatchUpLimits
from headwater.ranges.changefeed.changefeed import (
    INLINE,
    PAGE,
    CaughtUp,
    ChangeFeed,
    Checkpoint,
    FeedContext,
    FeedTiming,
)
from headwater.ranges.changefeed.watched_spans import (
    KeyChanged,
    SpanChange,
    SpanDeleted,
    Spans,
    SpanSet,
    TableChanged,
    WatchedSpan,
)
from headwater.ranges.pull.durable_wait import DurableWaits
from headwater.sources.sqlite.key_order import order


class Life:
    """One change feed over a `Fed`, which the test can stop, remove or feed with commits."""

    def __init__(
        self,
        fed: Fed,
        *watched: WatchedSpan,
        cursor: int = 0,
        floor: int = 0,
        patience: float = 60.0,
        checkpoints: float = 3600.0,
        make: type[Spans] = Spans,
    ) -> None:
        self.fed, self.is_stopping, self.is_there = fed, False, True
        self.calls = 0  # in threads
        self.waiting = DurableWaits()
        rooms = FeedContext(self.waiting, CatchUpLimits(2, 10**9), self._run, lambda: self.is_stopping)
        pace = FeedTiming(checkpoints=checkpoints, patience=patience)
        self.spans = spans = make(fed.source, watched)
        self.feed = ChangeFeed(fed, lambda: self.is_there, spans, cursor, floor, pace, rooms, lambda event: event)
        self._pages: AsyncIterator[list[Any]] = self.feed.pages("me")

    async def _run(self, call: Any, *args: Any) -> Any:
        self.calls += 1
        return call(*args)

    async def steady(self) -> list[Any]:
        """Return the events up to the steady state and its checkpoints."""
        found: list[Any] = []
        while not any(isinstance(each, CaughtUp) for each in found):
            found += await anext(self._pages)
        return found

    async def more(self) -> list[Any]:
        return await anext(self._pages)

    def commit(self, *changes: Change) -> None:
        self.fed.commit(*changes)
        self.fed.log.flush()


def keys(events: list[Any]) -> list[bytes]:
    return [each.key for each in events if isinstance(each, KeyChanged)]


def test_feed_catches_up_in_pages_and_continues_live() -> None:
    async def main() -> None:
        fed = Fed()
        life = Life(fed)
        life.commit(*map(insert, range(PAGE + 500)))
        events = await life.steady()
        assert keys(events) == [encode_key((id,)) for id in range(PAGE + 500)]
        *_, steady, checkpoint = events
        assert steady == CaughtUp(PAGE + 500, fed.log.generation)
        assert isinstance(checkpoint, Checkpoint) and checkpoint.watched is None and checkpoint.ts >= 1 << 16
        life.commit(insert(-1))
        assert keys(await life.more()) == [encode_key((-1,))]

    asyncio.run(main())


def test_staged_changes_are_sent_once_durable() -> None:
    async def main() -> None:
        fed = Fed()
        life = Life(fed)
        await life.steady()
        fed.commit(insert(1))  # a kill would give it another time
        asked = asyncio.ensure_future(life.more())
        done, _ = await asyncio.wait({asked}, timeout=0.05)
        assert not done
        fed.log.flush()
        assert keys(await asked) == [encode_key((1,))]

    asyncio.run(main())


APPLICATION = Table("odd", (Column("k", "str", nullable=False, collation="BY_APPLICATION"),), ("k",))


class Failing(Spans):
    """Spans that fail at an offset, a given number of times."""

    at, times = 0, 0

    def changes_of(self, part: Transaction, offset: int, change: Change) -> Iterator[SpanChange]:
        if offset == self.at and self.times:
            self.times -= 1
            raise Unavailable("the database refuses")
        return super().changes_of(part, offset, change)


@pytest.mark.parametrize("at", [1, 4, 40])
def test_checkpoint_does_not_pass_changes_after_an_error(at: int) -> None:
    async def main() -> None:
        life = Life(Fed(), make=Failing)
        spans = life.spans
        assert isinstance(spans, Failing)
        spans.at, spans.times = at, 2
        for id in range(1, 51):
            life.commit(insert(id))  # at the offset `id`
        told: list[Any] = []
        with pytest.raises(Unavailable):
            while True:
                told += await life.more()
        assert keys(told) == [encode_key((id,)) for id in range(1, at)]
        for last in life.feed.checkpoints():
            assert last.offset == at - 1 and last.ts < at << 16
        again = Life(life.fed, cursor=at - 1)
        assert keys(await again.steady()) == [encode_key((id,)) for id in range(at, 51)]

    asyncio.run(main())


def test_page_is_sent_before_the_check_that_ends_the_feed() -> None:
    async def main() -> None:
        life = Life(Fed(), checkpoints=0.0)
        life.commit(*map(insert, range(3)))

        async def refuse() -> None:
            raise Unavailable("too many wait")

        life.feed.before_checkpoint = refuse
        assert len(keys(await life.more())) == 3
        with pytest.raises(Unavailable):
            await life.more()
        assert [last.offset for last in life.feed.checkpoints()] == [3]

    asyncio.run(main())


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
def test_checkpoint_interval_respects_the_callers_limit(seconds: float) -> None:
    async def main() -> None:
        life = Life(Fed(), checkpoints=0.0)
        life.feed.least = lambda: seconds
        await life.steady()
        for number in range(2):
            life.commit(insert(number))
            assert keys(await life.more()) == [encode_key((number,))]
            if not seconds:
                assert isinstance((await life.more())[-1], Checkpoint)

    asyncio.run(main())


def test_feed_has_all_changes_of_a_table_with_an_unknown_collation_and_refuses_a_span() -> None:
    async def main() -> None:
        odd = Table("odd", (Column("k", "str", nullable=False),), ("k",))
        fed = Fed(ITEMS, odd)
        fed.source.order = lambda table, columns: order(APPLICATION if table is odd else table, columns)  # type: ignore[method-assign]
        life = Life(fed)
        life.commit(insert(1), Change(Op.INSERT, odd, None, ("a",)), Change(Op.UPDATE, odd, ("a",), ("A",)))
        found = keys(await life.steady())
        assert found == [encode_key((1,)), encode_key(("a",)), encode_key(("a",)), encode_key(("A",))]
        assert len(keys(await Life(fed, WatchedSpan("odd", Span())).steady())) == 3
        with pytest.raises(NotSupported):  # not: in or out of the span by bytes that mean nothing
            await Life(fed, WatchedSpan("odd", Span(b"", encode_key(("b",))))).steady()

    asyncio.run(main())


def test_changes_at_or_below_the_start_time_are_not_sent() -> None:
    async def main() -> None:
        life = Life(Fed(), floor=2 << 16)
        for id in range(4):
            life.commit(insert(id))  # at 1 << 16, 2 << 16, …
        assert keys(await life.steady()) == [encode_key((2,)), encode_key((3,))]

    asyncio.run(main())


def test_reader_that_never_catches_up_is_ended_as_slow() -> None:
    async def main() -> None:
        life = Life(Fed(), patience=0.0)
        await life.steady()
        life.commit(*map(insert, range(3 * PAGE)))
        assert len(keys(await life.more())) == PAGE
        assert len(keys(await life.more())) == PAGE
        with pytest.raises(Unavailable) as slow:
            await life.more()
        assert slow.value.extra["reason"] == "SLOW_CONSUMER" and slow.value.retryable
        (last,) = life.feed.checkpoints()
        assert last.offset == 2 * PAGE and last.ts < 1 << 16, "in the midst of a transaction: below it"

    asyncio.run(main())


def test_reader_that_keeps_up_is_not_ended() -> None:
    async def main() -> None:
        life = Life(Fed(), patience=0.0)
        await life.steady()
        for id in range(5):
            life.commit(insert(id))
            assert len(keys(await life.more())) == 1

    asyncio.run(main())


@pytest.mark.parametrize("what", ["stopping", "gone", "generation"])
def test_feed_ends_with_the_error_of_a_stop_drop_or_new_generation(what: str) -> None:
    async def main() -> None:
        fed = Fed()
        life = Life(fed, cursor=0)
        life.commit(insert(1))
        await life.steady()
        asked = asyncio.ensure_future(life.more())
        await asyncio.sleep(0)
        kind: type[HeadwaterError]
        if what == "stopping":
            life.is_stopping, kind = True, Unavailable
            life.waiting.drain()
        elif what == "gone":
            life.is_there, kind = False, NotFound
            life.waiting.drain()
        else:
            fed.new_generation()
            kind = OffsetExpired
        with pytest.raises(kind) as end:
            await asked
        if what == "generation":
            assert end.value.extra["resnapshot_reason"] == "log_generation_changed"

    asyncio.run(main())


def test_reader_overtaken_by_the_horizon_gets_an_error() -> None:
    async def main() -> None:
        fed = Fed()
        life = Life(fed)
        await life.steady()
        for id in range(20):
            life.commit(insert(id))
        fed.trim(5)
        with pytest.raises(OffsetExpired) as end:
            await life.more()
        assert end.value.extra["resnapshot_reason"] == "wal_horizon_exceeded" and "threshold" in end.value.extra

    asyncio.run(main())


def test_truncate_and_drop_are_sent_for_each_span() -> None:
    async def main() -> None:
        low, high = Span(b"", encode_key((5,))), Span(encode_key((5,)), None)
        life = Life(Fed(), WatchedSpan("items", low), WatchedSpan("items", high))
        life.commit(insert(1), name("x"))
        life.commit(Change(Op.TRUNCATE, ITEMS), Change(Op.TRUNCATE, NAMES))
        events = await life.steady()
        assert [each.watched.span for each in events if isinstance(each, SpanDeleted)] == [low, high]

    asyncio.run(main())


def test_changed_key_columns_end_the_feed_unless_the_table_was_dropped() -> None:
    other = Table("items", ITEMS.columns, ("note",), 2)

    async def main(*between: Change) -> list[Any]:
        life = Life(Fed())
        life.commit(insert(1))
        for change in between:
            life.commit(change)
        life.commit(Change(Op.INSERT, other, None, (1, 1, "a")))
        return await life.steady()

    with pytest.raises(OffsetExpired) as end:
        asyncio.run(main())
    assert end.value.extra["resnapshot_reason"] == "schema_changed"
    with pytest.raises(OffsetExpired):
        asyncio.run(main(Change(Op.SCHEMA_CHANGE, other, ddl="ALTER TABLE items")))
    dropped = Change(Op.SCHEMA_CHANGE, ITEMS, ddl="DROP TABLE items")
    events = asyncio.run(main(dropped, Change(Op.SCHEMA_CHANGE, other, ddl="CREATE TABLE items(…)")))
    assert [type(each) for each in events if not isinstance(each, (CaughtUp, Checkpoint))] == [
        KeyChanged,
        SpanDeleted,
        TableChanged,
        TableChanged,
        KeyChanged,
    ]


def test_renamed_table_of_a_shared_view_deletes_no_rows_of_another() -> None:
    async def main() -> None:
        life = Life(Fed())
        life.commit(insert(1))
        life.commit(Change(Op.SCHEMA_CHANGE, ITEMS, ddl="ALTER TABLE vault RENAME TO safe"))
        events = [each for each in await life.steady() if not isinstance(each, (CaughtUp, Checkpoint))]
        assert [type(each) for each in events] == [KeyChanged, TableChanged]

    asyncio.run(main())


def test_rows_without_a_key_have_an_empty_one() -> None:
    loose = Table("loose", (Column("v", "i64"),))

    async def main() -> None:
        life = Life(Fed(loose))
        life.commit(Change(Op.INSERT, loose, None, (1,)), Change(Op.INSERT, loose, None, (1,)))
        assert keys(await life.steady()) == [b"", b""]

    asyncio.run(main())


def test_equal_spans_have_one_checkpoint() -> None:
    async def main() -> None:
        whole, part = WatchedSpan("items", Span()), WatchedSpan("items", Span(b"a", b"b"))
        life = Life(Fed(), whole, part, whole, part)
        life.commit(insert(1))
        events = await life.steady()
        assert [each.watched for each in events if isinstance(each, Checkpoint)] == [whole, part, None]

    asyncio.run(main())


def test_checkpoints_of_many_spans_are_made_in_a_thread() -> None:
    async def main() -> None:
        watched = [WatchedSpan("items", Span(encode_key((id,)), encode_key((id + 1,)))) for id in range(INLINE + 1)]
        for spans, threads in ((watched[:INLINE], 0), (watched, 1)):
            life = Life(Fed(), *spans, checkpoints=0.0)
            life.commit(insert(1))
            await life.steady()
            calls = life.calls
            assert len(await life.more()) == len(spans) + 1
            assert life.calls - calls == threads

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(20))
def test_span_set_contains_exactly_the_keys_of_its_spans(seed: int) -> None:
    chance = random.Random(seed)
    edges = [bytes([byte]) for byte in range(20)]
    spans = [Span(*sorted(chance.sample(edges, 2))) for _ in range(chance.randrange(8))]
    spans += [Span(chance.choice(edges))] * (seed % 3 == 0)
    cover = SpanSet(spans)
    for key in [b"", *edges, *(edge + b"x" for edge in edges)]:
        assert cover.contains(key) == any(span.contains(key) for span in spans)


def test_span_set_joins_overlapping_and_touching_spans() -> None:
    assert len(SpanSet([Span(b"c", b"e"), Span(b"a", b"c"), Span(b"d", b"d5"), Span(b"a", b"b")])) == 1


def test_large_rows_are_encoded_in_a_thread() -> None:
    async def main() -> None:
        life = Life(Fed())
        await life.steady()
        for note, threads in (("x", 0), ("x" * 100_000, 1)):
            calls = life.calls
            life.commit(insert(len(note), note=note), insert(-len(note)))  # not the last one: each is looked at
            await life.more()
            assert life.calls - calls == threads

    asyncio.run(main())
