"""Streams: passing changes arrive once and in order on one connection, through every state of the stream."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.feeds.feed_database import (
    FILTERS,
    WITHOUT_SIZE,
    Fed,
    ReceivedFrame,
    Writer,
    changes,
    frames_of,
    hesitant,
    in_loop,
    insert,
    line,
    moments,
    name,
    run,
    settled,
    words,
)
from tests.suite.deadlines import PATIENCE

from headwater.feeds.deliver import hub as hub_module
from headwater.feeds.deliver import stream as stream_module
from headwater.feeds.deliver.consumer import Consumer
from headwater.feeds.deliver.hub import Hub
from headwater.feeds.deliver.stream import Stream
from headwater.feeds.deliver.stream_request import Transport
from headwater.feeds.groups import group as group_module
from headwater.feeds.options import Options
from headwater.feeds.subscription import END, SnapshotSpan, SnapshotState, Subscription
from headwater.feeds.subscriptions.registry import Registry
from headwater.model.change import Change, Op, Transaction
from headwater.model.clock import parse_ts
from headwater.model.principal import Principal

NEVER = 1e9
WHO = Principal("ann", "owner")


class Clock:
    """The clock of the streams, which the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stream_module, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    made = Registry.open(tmp_path / "subscriptions.db")
    yield made
    made.close()


class Reading:
    """One connection: a task that takes the frames of a stream."""

    def __init__(self, stream: Stream, pace: Callable[[], int] = lambda: 1) -> None:
        self.stream, self._pace = stream, pace
        self.frames: list[ReceivedFrame] = []
        self.pieces: list[bytes] = []
        self.began = stream.cursor
        self.stalled = asyncio.Event()
        self.stalled.set()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while (piece := await self.stream.next()) is not None:
            self.pieces.append(piece)
            self.frames += frames_of(piece)
            await moments(self._pace())
            await self.stalled.wait()

    async def idle(self) -> None:
        """Wait until the reader has everything and sleeps."""
        for _ in range(100_000):
            if self.task.done():
                break
            sleeps = self.stream._sleeping is not None and not self.stream._sleeping.done()
            if sleeps and self.stream.consumer.hub.upto >= self.stream.consumer.log.latest:
                return
            await asyncio.sleep(0)
        assert self.task.done(), "the stream neither sleeps nor ends"
        self.task.result()

    async def end(self) -> None:
        """Wait until the stream ends."""
        await self.task
        self.stream.close()

    async def close(self) -> None:
        self.stream.leave()
        await self.end()

    def take(self) -> list[ReceivedFrame]:
        """Return the frames received since the last call."""
        found, self.frames = self.frames, []
        return found


class Place:
    """A hub, and the streams opened on it."""

    def __init__(self, fed: Fed, hub: Hub, run: Any, registry: Any) -> None:
        self.fed, self.hub, self.run, self.registry = fed, hub, run, registry
        self.open: list[Reading] = []

    def consumer(self, held: Subscription | None = None, **given: Any) -> Consumer:
        asked = Options(db="main", **{"after": True, **given}) if held is None else held.options
        return Consumer(self.fed, self.hub, self.hub.view(asked), self.run, self.registry, held)

    def read(
        self,
        *,
        cursor: int | None = None,
        consumer: Consumer | None = None,
        checkpoints: float = NEVER,
        pace: Callable[[], int] = lambda: 1,
        upto: int | None = None,
        **given: Any,
    ) -> Reading:
        found = self.consumer(**given) if consumer is None else consumer
        at = self.fed.log.latest if cursor is None else cursor
        opening = Transport("test", line, ping=b"0 ping {}\n", farewell=b"0 bye {}\n")
        stream = Stream(found, opening, cursor=at, upto=upto, checkpoint_seconds=checkpoints)
        self.open.append(Reading(stream, pace))
        return self.open[-1]

    def subscribe(self, **given: Any) -> Subscription:
        asked = Options(db="main", **{"after": True, **given})
        held, _ = self.registry.create(WHO, asked, acked=self.fed.log.latest)
        return held  # type: ignore[no-any-return]


@asynccontextmanager
async def place(fed: Fed, run: Any = run, registry: Any = None) -> AsyncIterator[Place]:
    made = Place(fed, Hub(fed.log, fed.source, run), run, registry)
    try:
        yield made
        for reading in made.open:
            if not reading.task.done():
                await reading.close()
        assert not made.hub._groups, "everything is given back"
    finally:
        await made.hub.close()


def check_checkpoints(fed: Fed, reading: Reading) -> int:
    """Check that each checkpoint is correct for the changes before and after it; return the number of checkpoints."""
    ends = {part.upto: part.ts for part in fed.log.scan(after=0) if part.last}
    times = {offset: part.ts for part in fed.log.scan(after=0) for offset in range(part.first, part.upto + 1)}
    expected = [found.offset for found in fed.expected(reading.stream.consumer.view, after=reading.began)]
    seen: list[int] = []
    count, last = 0, 0
    for frame in reading.frames:
        if frame.word == "checkpoint":
            count += 1
            ts, offset = parse_ts(frame.json["ts"]), frame.json["offset"]
            assert int(frame.id) == offset and (offset in ends or offset == 0), "it splits no transaction"
            assert offset >= last
            last = offset
            assert seen == [one for one in expected if one <= offset], "everything up to it was delivered"
            assert all(time > ts for at, time in times.items() if at > offset)
            assert ts >= ends.get(offset, 0)
        elif frame.word in ("insert", "update", "delete"):
            seen.append(int(frame.id))
    return count


# --- from the log to live ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_stream_has_no_gap_and_no_repeat_at_any_speed(seed: int, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(hub_module, "BATCH", 16)
    monkeypatch.setattr(hub_module, "KEPT_FRAMES", 40 + seed * 10)
    monkeypatch.setattr(hub_module, "FEW", (4, 0, 8)[seed % 3])
    monkeypatch.setattr(hub_module, "APART", seed % 7)
    for module in (group_module, stream_module):
        monkeypatch.setattr(module, "PIECE", 900)
    monkeypatch.setattr(stream_module, "PAGE", 10)

    async def work() -> None:
        chance = random.Random(seed)
        fed = Fed(part=30, keep_changes=16 if seed % 3 == 0 else 4096)
        writer = Writer(fed, seed, largest=20 if seed % 4 == 0 else 4)
        writer.write(20)
        async with place(fed, hesitant(seed)) as here:
            for _ in range(150):
                match chance.randrange(8):
                    case 0 | 1 | 2:
                        writer.write(chance.randint(1, 3))
                        if chance.random() < 0.2:
                            fed.log.flush()
                    case 3 if len(here.open) < 8:
                        slowness = chance.choice([1, 2, 12])
                        here.read(
                            cursor=chance.choice([0, chance.randint(0, fed.log.latest), fed.log.latest]),
                            checkpoints=chance.choice([0.5, 3.0, NEVER]),
                            pace=lambda slowness=slowness: chance.randrange(slowness) + 1,  # type: ignore[misc]
                            format=chance.choice(["objects_json", "debezium_json"]),
                            **chance.choice(FILTERS),
                        )
                    case 4:
                        clock.now += 0.3
                        for reading in here.open:
                            reading.stream.tick(clock.now)
                    case 5 if here.open:
                        chance.choice(here.open).stream.changed()
                    case _:
                        await moments(chance.randrange(4))
            assert here.open
            for reading in here.open:
                reading.stream._checkpoint_at = NEVER
                await reading.idle()
                view = reading.stream.consumer.view
                assert changes(reading.frames) == fed.expected(view, after=reading.began)
                reading.stream.tick(clock.now)
                assert reading.stream.cursor == fed.log.latest
                assert reading.stream.deliveries == len(changes(reading.frames))
                check_checkpoints(fed, reading)
                assert set(words(reading.frames)) <= {"insert", "update", "delete", "checkpoint", "caught_up"}

    in_loop(work)


def test_stream_from_the_head_sends_no_caught_up() -> None:
    async def work() -> None:
        fed = Fed()
        fed.commit(insert(1))
        async with place(fed) as here:
            reading = here.read()
            await reading.idle()
            fed.commit(insert(2))
            await reading.idle()
            assert words(reading.frames) == ["insert"]

    in_loop(work)


def test_stream_from_behind_sends_caught_up_once() -> None:
    async def work() -> None:
        fed = Fed()
        fed.commit(insert(1))
        fed.commit(insert(2))
        async with place(fed) as here:
            reading = here.read(cursor=0)
            await reading.idle()
            fed.commit(insert(3))
            await reading.idle()
            assert words(reading.frames) == ["insert", "insert", "caught_up", "insert"]
            assert reading.frames[2].id == "2"
            assert reading.frames[2].json == {"offset": 2, "latest_offset": 2}

    in_loop(work)


def test_stream_from_behind_a_quiet_stretch_sends_caught_up() -> None:
    async def work() -> None:
        fed = Fed()
        fed.commit(name("a"), name("b"))
        async with place(fed) as here:
            reading = here.read(cursor=0, tables=("items",))
            await reading.idle()
            assert [(found.word, found.id) for found in reading.frames] == [("caught_up", "2")]

    in_loop(work)


def test_caught_up_waits_until_the_log_reaches_the_snapshot_rows() -> None:
    async def work() -> None:
        fed = Fed()
        fed.commit(insert(1))
        fed.commit(insert(2))
        async with place(fed) as here:
            consumer = here.consumer()
            consumer.finished(
                SnapshotState(tables=("items",), done=True, chunks=(SnapshotSpan("items", END, 1),), again=4)
            )
            reading = here.read(consumer=consumer, cursor=1)
            await reading.idle()
            assert words(reading.frames) == ["insert"], "rows were read again at 4"
            fed.commit(insert(3))
            fed.commit(insert(4))
            await reading.idle()
            assert words(reading.frames) == ["insert", "insert", "insert", "caught_up"]
            assert reading.frames[-1].id == "4"

    in_loop(work)


def test_caught_up_is_sent_despite_concurrent_changes() -> None:
    """The last missing change arrives as a published frame: caught_up must follow at once, not at the next tick."""

    async def work() -> None:
        fed = Fed()
        fed.commit(insert(1))
        async with place(fed) as here:
            other = here.read()
            await other.idle()
            reading = here.read(cursor=0)
            reading.stalled.clear()
            await reading_has(reading, 1)
            fed.commit(insert(2))
            fed.commit(insert(3))
            await settled(here.hub, fed)
            reading.stalled.set()
            await reading.idle()
            assert words(reading.frames) == ["insert", "insert", "insert", "caught_up"]

    in_loop(work)


def test_stream_that_fell_behind_reads_the_log_then_sends_caught_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "KEPT_FRAMES", 10)

    async def work() -> None:
        fed = Fed()
        async with place(fed) as here:
            slow, quick = here.read(), here.read()
            fed.commit(insert(0))
            await slow.idle()
            slow.stalled.clear()
            for id in range(1, 40):
                fed.commit(insert(id))
                await settled(here.hub, fed)
            slow.stalled.set()
            await slow.idle()
            assert changes(slow.frames) == fed.expected(slow.stream.consumer.view)
            assert words(slow.frames).count("caught_up") == 1 and words(slow.frames)[-1] == "caught_up"
            assert "caught_up" not in words(quick.frames)

    in_loop(work)


def test_hub_publishes_nothing_for_a_stream_that_is_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "KEPT_FRAMES", 10)
    monkeypatch.setattr(stream_module, "PAGE", 5)

    async def work() -> None:
        fed = Fed()
        for id in range(40):
            fed.commit(insert(id))
        async with place(fed) as here:
            reading = here.read(cursor=0)
            reading.stalled.clear()
            await moments(20)
            for id in range(40, 80):
                fed.commit(insert(id))
                await moments(2)
            assert not here.hub._groups
            reading.stalled.set()
            await reading.idle()
            assert len(here.hub._groups) == 1
            fed.commit(insert(80))
            await reading.idle()
            assert changes(reading.frames) == fed.expected(reading.stream.consumer.view)
            assert words(reading.frames).count("caught_up") == 1

    in_loop(work)


def test_few_streams_read_bulk_changes_from_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[int] = []
    publish = Hub._publish

    async def noted(self: Hub, parts: list[Transaction]) -> None:
        published.extend(range(parts[0].first, parts[-1].upto + 1))
        await publish(self, parts)

    monkeypatch.setattr(Hub, "_publish", noted)

    async def work(few: bool) -> None:
        fed = Fed()
        async with place(fed) as here:
            for id in range(1 if few else hub_module.FEW + 1):
                here.read(tables=("items",), ops=("insert",) if id else ())
            for reading in here.open:
                await reading.idle()
            for size in (1, hub_module.APART, hub_module.APART + 1, 1000, 1):
                published.clear()
                fed.commit(*(insert(id) for id in range(size)))
                for reading in here.open:
                    await reading.idle()
                assert len(published) == (0 if few and size > hub_module.APART else size)
            for reading in here.open:
                assert changes(reading.frames) == fed.expected(reading.stream.consumer.view)
                assert set(words(reading.frames)) == {"insert"}, "it was not slow, so caught_up is not sent"

    for few in (True, False):
        in_loop(lambda few=few: work(few))  # type: ignore[misc]


def test_waiting_poll_next_to_a_stream_keeps_the_hub_publishing() -> None:
    """Polls profit from published frames, most of all those with a selective filter."""

    async def work() -> None:
        fed = Fed()
        async with place(fed) as here:
            reading = here.read()
            await reading.idle()
            group = here.hub.join(here.hub.view(Options(db="main", tables=("names",))), line)
            fed.commit(*(insert(id) for id in range(1000)))
            await reading.idle()
            assert here.hub.upto == fed.log.latest and group.is_live
            here.hub.leave(group)
            assert changes(reading.frames) == fed.expected(reading.stream.consumer.view)

    in_loop(work)


def test_changes_waiting_for_a_stalled_reader_are_sent_in_pieces_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (group_module, stream_module):
        monkeypatch.setattr(module, "PIECE", 4000)

    async def work() -> None:
        fed = Fed()
        async with place(fed) as here:
            reading = here.read()
            await reading.idle()
            for id in range(500):
                fed.commit(insert(id, note="x" * 50))
            await reading.idle()
            assert changes(reading.frames) == fed.expected(reading.stream.consumer.view)
            assert max(map(len, reading.pieces)) < 4000 + 500

    in_loop(work)


# --- pause and end -------------------------------------------------------------------------------------------------


def test_paused_stream_is_silent_and_resumes_where_it_was(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed(retention=1000)
        async with place(fed, registry=registry) as here:
            held = here.subscribe()
            reading = here.read(consumer=here.consumer(held))
            await reading.idle()
            registry.set_paused(held.id, True)
            reading.stream.changed()
            await reading.idle()
            for id in range(5):
                fed.commit(insert(id))
            await settled(here.hub, fed)
            found = reading.take()
            assert [frame.word for frame in found] == ["backpressure"]
            assert found[0].json["state"] == "paused" and found[0].json["paused"] is True
            assert found[0].json["sub_id"] == held.id
            registry.set_paused(held.id, False)
            reading.stream.changed()
            await reading.idle()
            assert changes(reading.frames) == fed.expected(reading.stream.consumer.view)

    in_loop(work)


def test_closed_subscription_ends_its_stream_silently(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed()
        async with place(fed, registry=registry) as here:
            reading = here.read(consumer=here.consumer(here.subscribe()))
            await reading.idle()
            reading.stream.consumer.closed = True
            reading.stream.changed()
            await reading.end()
            assert reading.frames == []
            assert reading.stream.ending is not None and reading.stream.ending.code == "closed"

    in_loop(work)


def test_stopping_server_sends_a_last_checkpoint_and_farewell() -> None:
    async def work() -> None:
        fed = Fed()
        async with place(fed) as here:
            reading = here.read()
            fed.commit(insert(1), insert(2))
            await reading.idle()
            reading.stream.stop()
            await reading.end()
            assert words(reading.frames) == ["insert", "insert", "checkpoint", "bye"]
            assert reading.frames[2].json["offset"] == 2
            assert reading.stream.ending is not None and reading.stream.ending.code == "stopping"

    in_loop(work)


def test_last_checkpoint_is_omitted_if_a_change_was_not_delivered() -> None:
    async def work() -> None:
        fed = Fed()
        async with place(fed) as here:
            reading = here.read()
            fed.commit(insert(1))
            await reading.idle()
            reading.stalled.clear()
            fed.commit(insert(2))
            await settled(here.hub, fed)
            fed.commit(insert(3))
            await settled(here.hub, fed)
            reading.stream.stop()
            reading.stalled.set()
            await reading.end()
            assert words(reading.frames)[-1] == "bye"
            check_checkpoints(fed, reading)

    in_loop(work)


def test_last_checkpoint_is_omitted_if_the_hub_continued_without_the_group() -> None:
    async def work() -> None:
        fed = Fed()
        async with place(fed) as here:
            reading = here.read()
            fed.commit(insert(1))
            await reading.idle()
            reading.stalled.clear()
            fed.commit(insert(2))
            await settled(here.hub, fed)
            here.hub._suspend_all()
            other = here.read()
            await other.idle()
            fed.commit(insert(3))
            await settled(here.hub, fed)
            assert here.hub.upto == 3
            reading.stream.stop()
            reading.stalled.set()
            await reading.end()
            assert words(reading.frames) == ["insert", "insert", "bye"]

    in_loop(work)


def test_bounded_stream_ends_at_upto() -> None:
    async def work() -> None:
        fed = Fed()
        Writer(fed, 3).write(30)
        async with place(fed) as here:
            for upto in (0, 5, fed.log.latest):
                reading = here.read(cursor=0, upto=upto, tables=("items",))
                await reading.end()
                view = reading.stream.consumer.view
                assert changes(reading.frames) == (fed.expected(view, upto=upto) if upto else [])
                assert reading.stream.ending is not None and reading.stream.ending.code == "complete"
            beyond = here.read(cursor=0, upto=fed.log.latest + 2)
            await beyond.idle()
            assert not beyond.task.done()
            fed.commit(insert(100))
            await beyond.idle()
            fed.commit(insert(101), insert(102))
            await beyond.end()
            assert [found.offset for found in changes(beyond.frames)] == list(range(1, fed.log.latest))

    in_loop(work)


def test_bounded_stream_is_complete_after_a_publishing_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        fed = Fed()
        async with place(fed) as here:
            reading = here.read(cursor=0, upto=1)
            await reading.idle()

            def broken(changes: Any) -> Any:
                raise ZeroDivisionError

            here.hub._router.route = broken  # type: ignore[method-assign]
            fed.commit(insert(1))
            await asyncio.wait_for(reading.end(), PATIENCE)
            assert words(reading.frames) == ["insert"]

    with caplog.at_level("CRITICAL", "headwater.feeds"):
        in_loop(work)


def test_leaving_reader_ends_the_stream_in_any_state() -> None:
    async def work() -> None:
        fed = Fed()
        fed.commit(insert(1))
        async with place(fed) as here:
            for count in range(8):
                reading = here.read(cursor=0)
                await moments(count)
                await reading.close()
                assert reading.stream.ending is not None and reading.stream.ending.message == "the reader left"

    in_loop(work)


def test_refused_reader_receives_the_reason() -> None:
    async def work() -> None:
        fed = Fed()
        async with place(fed) as here:
            reading = here.read()
            await reading.idle()
            reading.stream.refuse("invalid_request", "no")
            await reading.end()
            assert reading.stream.ending is not None
            assert (reading.stream.ending.code, reading.stream.ending.message) == ("invalid_request", "no")

    in_loop(work)


# --- evicted streams -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [False, True])
def test_evicted_stream_sends_resnapshot_and_ends(live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "KEPT_FRAMES", 5)

    async def work() -> None:
        fed = Fed(retention=10)
        async with place(fed) as here:
            reading = here.read(tables=("items",)) if live else None
            if reading is not None:
                fed.commit(insert(0))
                await reading.idle()
                reading.stalled.clear()
            for id in range(1, 40):
                fed.commit(insert(id))
                await moments(3)
            if reading is None:
                reading = here.read(cursor=2, tables=("items",))
            reading.stalled.set()
            await reading.end()
            last = reading.frames[-1]
            horizon, latest = fed.log.horizon, fed.log.latest
            assert last.word == "resnapshot" and int(last.id) == horizon - 1
            assert last.json == {
                "earliest_offset": horizon,
                "latest_offset": latest,
                "resnapshot_from_offset": horizon - 1,
                "reason": "wal_horizon_exceeded",
                "snapshot_url": f"/api/v1/snapshot/main/items?version={fed.log.generation}.{latest}",
            }
            assert reading.stream.ending is not None and reading.stream.ending.code == "resnapshot_required"

    in_loop(work)


def test_new_generation_ends_every_stream_with_its_reason() -> None:
    async def work() -> None:
        fed = Fed()
        fed.commit(insert(1))
        async with place(fed) as here:
            readings = [here.read(), here.read(cursor=0), here.read(tables=("names",))]
            for reading in readings:
                await reading.idle()
            fed.new_generation()
            for reading in readings:
                await asyncio.wait_for(reading.end(), PATIENCE)
                assert reading.frames[-1].word == "resnapshot"
                assert reading.frames[-1].json["reason"] == "log_generation_changed"

    in_loop(work)


def test_selective_filter_on_a_busy_log_is_not_evicted(registry: Registry) -> None:
    """Nothing woke the stream, and the log evicted the changes after its cursor."""

    async def work() -> None:
        fed = Fed(retention=20)
        async with place(fed, registry=registry) as here:
            held = here.subscribe(tables=("items",))
            readings = [here.read(consumer=here.consumer(held)), here.read(tables=("items",))]
            for reading in readings:
                await reading.idle()
            for number in range(100):
                fed.commit(name(f"n{number}"))
                await settled(here.hub, fed)
            for reading in readings:
                reading.stream.changed()
                await reading.idle()
                assert "resnapshot" not in words(reading.frames)
                reading.stream.tick(0.0)
            assert held.cursor == fed.log.latest, "what does not concern it counts as seen"
            fed.commit(insert(1))
            for reading in readings:
                await reading.idle()
                assert [found.offset for found in changes(reading.frames)] == [101]

    in_loop(work)


# --- a filter that no longer fits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [False, True])
def test_drop_of_a_filter_column_ends_the_stream_after_earlier_changes(slow: bool) -> None:
    async def work() -> None:
        fed = Fed()
        async with place(fed) as here:
            reading = here.read(tables=("items",), where="size > 2", ops=("insert", "update", "delete"))
            await reading.idle()
            fed.commit(insert(1, 5))
            if not slow:
                await reading.idle()
            fed.commit(insert(2, 5))
            fed.commit(Change(Op.SCHEMA_CHANGE, WITHOUT_SIZE))
            fed.commit(Change(Op.INSERT, WITHOUT_SIZE, None, (3, "")))
            await reading.end()
            assert words(reading.frames) == ["insert", "insert", "failed"]
            error = reading.frames[-1]
            assert error.json["code"] == "invalid_request" and "does not fit" in error.json["message"]
            assert 2 <= int(error.id) < 4
            assert reading.stream.ending is not None and reading.stream.ending.code == "invalid_request"

    in_loop(work)


@pytest.mark.parametrize("slow", [False, True])
def test_internal_error_ends_only_its_own_stream(
    slow: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        fed = Fed()
        async with place(fed) as here:
            reading, other = here.read(format="plain_json"), here.read(format="objects_json")
            await reading.idle()
            fed.commit(insert(1))
            if not slow:
                await reading.idle()
            monkeypatch.setattr(reading.stream.consumer.view.encoder, "change", broken)
            fed.commit(insert(2))
            await reading.end()
            assert words(reading.frames)[-1] == "failed"
            assert reading.frames[-1].json["code"] == "internal" and reading.frames[-1].json["details"]["hint"]
            assert reading.stream.ending is not None and reading.stream.ending.code == "internal"
            await other.idle()
            assert [frame.id for frame in other.frames if frame.word == "insert"] == ["1", "2"]

    def broken(*given: Any) -> bytes:
        raise IndexError("tuple index out of range")

    in_loop(work)
    assert "tuple index" in caplog.text


# --- checkpoints and pings -----------------------------------------------------------------------------------------


def test_checkpoints_are_sent_at_the_interval_when_idle(clock: Clock) -> None:
    async def work() -> None:
        fed = Fed()
        async with place(fed) as here:
            reading = here.read(checkpoints=5.0)
            fed.commit(insert(1), insert(2))
            await reading.idle()
            assert words(reading.take()) == ["insert", "insert"]
            for seconds, due in ((4.9, 0), (0.2, 1), (0.1, 0), (4.0, 0), (1.0, 1), (5.0, 1)):
                clock.now += seconds
                reading.stream.tick(clock.now)
                await reading.idle()
                assert words(reading.take()) == ["checkpoint"] * due, seconds

    in_loop(work)


def test_checkpoints_are_sent_under_constant_load(clock: Clock) -> None:
    async def work() -> None:
        fed = Fed()
        async with place(fed) as here:
            reading = here.read(checkpoints=5.0)
            await reading.idle()
            for id in range(100):
                fed.commit(insert(id))
                clock.now += 0.25
                reading.stream.tick(clock.now)
                await moments(1)
            await reading.idle()
            assert check_checkpoints(fed, reading) >= 4

    in_loop(work)


def test_checkpoints_are_sent_while_catching_up(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "PAGE", 10)

    async def work() -> None:
        fed = Fed()
        Writer(fed, 5, largest=1).write(400)
        async with place(fed) as here:
            reading = here.read(cursor=0, checkpoints=5.0, pace=lambda: clock.__setattr__("now", clock.now + 1.0) or 1)
            await reading.idle()
            assert check_checkpoints(fed, reading) >= 6
            assert changes(reading.frames) == fed.expected(reading.stream.consumer.view)

    in_loop(work)


def test_idle_stream_sends_a_ping(clock: Clock) -> None:
    async def work() -> None:
        fed = Fed()
        async with place(fed) as here:
            reading = here.read()
            await reading.idle()

            async def passes(seconds: float) -> list[str]:
                for _ in range(int(seconds * 4)):
                    clock.now += 0.25
                    reading.stream.tick(clock.now)
                    await reading.idle()
                return words(reading.take())

            assert [await passes(seconds) for seconds in (14, 2, 13, 3)] == [[], ["ping"], [], ["ping"]]
            await passes(10)
            fed.commit(insert(1))
            await reading.idle()
            assert await passes(14) == ["insert"], "a change is a sign of life, too"
            assert await passes(2) == ["ping"]

    in_loop(work)


# --- backpressure --------------------------------------------------------------------------------------------------


def test_backpressure_is_sent_once_per_change_of_state(registry: Registry, clock: Clock) -> None:
    async def work() -> None:
        fed = Fed(retention=100)
        async with place(fed, registry=registry) as here:
            held = here.subscribe()
            reading = here.read(consumer=here.consumer(held))
            await reading.idle()
            states = []

            async def look() -> None:
                clock.now += 0.25
                reading.stream.tick(clock.now)
                await reading.idle()
                states.extend(
                    (found.json["state"], found.json["lag"]) for found in reading.take() if found.word == "backpressure"
                )

            for id in range(90):
                fed.commit(insert(id))
                await look()
            assert states == [("pressure", 50), ("throttle", 75)]
            registry.ack(held.id, 90)
            reading.stream.changed()
            await look()
            for id in range(100, 160):
                fed.commit(insert(id))
                await look()
            assert states[2:] == [("pressure", 50)], "a return to healthy is not sent, a return to pressure is"

    in_loop(work)


def test_many_acks_between_two_reads_report_each_change_of_state_once(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed(retention=1000)
        async with place(fed, registry=registry) as here:
            held = here.subscribe()
            reading = here.read(consumer=here.consumer(held))
            await reading.idle()
            for id in range(800):
                fed.commit(insert(id))
            for offset in range(1, 700):
                registry.ack(held.id, offset)
                reading.stream.changed()
            assert [peak.state for peak in reading.stream._peaks] == ["throttle", "pressure", "healthy"]
            await reading.idle()
            states = [frame.json["state"] for frame in reading.take() if frame.word == "backpressure"]
            assert states == ["pressure", "throttle", "pressure"]

    in_loop(work)


def test_unread_changes_of_state_are_limited_and_no_state_is_lost(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed(retention=100)
        async with place(fed, registry=registry) as here:
            held = here.subscribe()
            reading = here.read(consumer=here.consumer(held))
            await reading.idle()

            def lag_and_ack(lag: int) -> None:
                for _ in range(lag):
                    fed.commit(insert(fed.log.latest))
                for offset in (fed.log.latest - 1, fed.log.latest):
                    registry.ack(held.id, offset)
                    reading.stream.changed()

            for _ in range(100):
                lag_and_ack(60)
            assert len(reading.stream._peaks) == stream_module.MAX_PEAKS
            lag_and_ack(80)
            assert len(reading.stream._peaks) == stream_module.MAX_PEAKS + 1
            await reading.idle()
            states = [frame.json["state"] for frame in reading.take() if frame.word == "backpressure"]
            repeats = ["pressure"] * (stream_module.MAX_PEAKS // 2)
            assert states == [*repeats, "pressure", "throttle", "resnapshot_required"]

    in_loop(work)


def test_stream_without_subscription_has_no_backpressure(clock: Clock) -> None:
    async def work() -> None:
        fed = Fed(retention=50)
        async with place(fed) as here:
            reading = here.read()
            await reading.idle()
            for id in range(200):
                fed.commit(insert(id))
                reading.stream.tick(clock.now)
                await reading.idle()
            assert set(words(reading.frames)) == {"insert"}

    in_loop(work)


def test_changes_acked_by_another_request_are_not_delivered(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed()
        async with place(fed, registry=registry) as here:
            held = here.subscribe()
            reading = here.read(consumer=here.consumer(held))
            await reading.idle()
            reading.stalled.clear()
            fed.commit(insert(1))
            await reading_has(reading, 1)
            for id in range(2, 10):
                fed.commit(insert(id))
            await settled(here.hub, fed)
            registry.ack(held.id, 6)
            reading.stream.changed()
            reading.stalled.set()
            await reading.idle()
            assert [found.offset for found in changes(reading.frames)] == [1, 7, 8, 9]

    in_loop(work)


async def reading_has(reading: Reading, count: int) -> None:
    for _ in range(1000):
        if len(reading.frames) >= count:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{reading.frames}")


def test_quiet_cursor_moves_only_over_acked_or_filtered_changes(
    registry: Registry,
) -> None:
    async def work() -> None:
        fed = Fed()
        async with place(fed, registry=registry) as here:
            held = here.subscribe(tables=("items",))
            reading = here.read(consumer=here.consumer(held))
            fed.commit(name("a"))
            await reading.idle()
            await settled(here.hub, fed)
            reading.stream.tick(0.0)
            assert held.cursor == 1
            fed.commit(insert(1))
            fed.commit(name("b"))
            await reading.idle()
            reading.stream.tick(0.0)
            assert held.cursor == 1, "a change that was sent and not acked stays"
            registry.ack(held.id, 2)
            reading.stream.changed()
            await reading.idle()
            reading.stream.tick(0.0)
            assert held.cursor == 3 and held.acked == 2

    in_loop(work)
