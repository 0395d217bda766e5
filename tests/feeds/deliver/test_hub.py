"""The hub: every member receives passing changes once and in order, and no group slows another."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.feeds.feed_database import (
    FILTERS,
    ITEMS,
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
)
from tests.suite.deadlines import PATIENCE

from headwater.feeds.deliver import hub as hub_module
from headwater.feeds.deliver.hub import Hub
from headwater.feeds.formats.encoder import Encoder
from headwater.feeds.formats.native import Native
from headwater.feeds.groups import group as group_module
from headwater.feeds.groups import hub_batch as batch_module
from headwater.feeds.groups.group import Group
from headwater.feeds.options import Options
from headwater.model.change import Change, Op, Transaction, image_bytes
from headwater.model.literal import Json
from headwater.model.table import Column, Table


@asynccontextmanager
async def opened(fed: Fed, run: Any = run) -> AsyncIterator[Hub]:
    hub = Hub(fed.log, fed.source, run)
    try:
        yield hub
    finally:
        await hub.close()


def options(**given: Any) -> Options:
    return Options(db="main", **{"after": True, **given})


class Sleeper:
    """A member that counts how often the hub wakes it."""

    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


class Taker:
    """A reader of one group, which reads the log when the hub has evicted frames it has not taken."""

    def __init__(self, fed: Fed, hub: Hub, given: Options) -> None:
        self.fed, self.hub, self.view = fed, hub, hub.view(given)
        self.group = hub.join(self.view, line)
        self.began = self.cursor = hub.upto
        self.epoch = hub.epoch
        self.seen = self.group.seek(self.cursor)
        self.found: list[ReceivedFrame] = []
        self.fell_back = 0

    def take(self) -> None:
        """Take one piece."""
        if self.group.is_suspended:
            self._come_back()
        # The hub excludes a group whose filter took too much CPU time: its members read the log.
        is_behind = self.epoch != self.hub.epoch or not self.group.is_live
        taken = None if is_behind or self.seen is None else self.group.take(self.seen)
        if taken is None:
            self._read_the_log()
        elif taken.piece:
            self.found += frames_of(taken.piece)
            self.seen = taken.seen
            self.cursor = self.hub.upto if taken.seen == self.group.published else taken.offset
        else:
            self.cursor = self.hub.upto

    def _come_back(self) -> None:
        self.hub.leave(self.group)
        self.group, self.seen = self.hub.join(self.view, line), None

    def _read_the_log(self) -> None:
        self.fell_back += 1
        for offset, op, data in self.fed.expected(self.view, after=self.cursor, upto=self.hub.upto):
            self.found.append(ReceivedFrame(str(offset), op.word, data))
        self.cursor, self.epoch = self.hub.upto, self.hub.epoch
        self.seen = self.group.seek(self.cursor)
        # A group that is created while a batch is published begins after that batch.
        assert self.seen is not None or not self.group.is_live or self.hub._routed > self.hub.upto

    async def finish(self) -> None:
        while self.hub.upto < self.fed.log.latest:
            if self.group.is_suspended:
                self._come_back()  # nothing is published without groups
            await asyncio.sleep(0)
        while self.cursor < self.hub.upto:
            self.take()
        expected = self.fed.expected(self.view, after=self.began)
        assert changes(self.found) == expected
        self.hub.leave(self.group)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_every_member_receives_passing_changes_once_and_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "BATCH", 16)
    monkeypatch.setattr(hub_module, "KEPT_FRAMES", 60)
    monkeypatch.setattr(group_module, "PIECE", 600)
    if seed % 2:
        monkeypatch.setattr(hub_module, "TURN_SECONDS", -1.0)  # other tasks run between any two groups
    if seed % 4 == 0:
        monkeypatch.setattr(hub_module, "MOST_ROUTED", 10)
    if seed % 5 == 0:
        monkeypatch.setattr(batch_module, "MOST_WORK", 30)

    async def work() -> None:
        chance = random.Random(seed)
        fed = Fed(part=20, keep_changes=8 if seed % 3 == 0 else 4096)
        writer = Writer(fed, seed, largest=30 if seed % 2 else 4)
        async with opened(fed, hesitant(seed)) as hub:
            takers: list[Taker] = []
            for _ in range(150):
                match chance.randrange(6):
                    case 0 | 1:
                        writer.write()
                        if chance.random() < 0.3:
                            fed.log.flush()
                    case 2:
                        takers.append(Taker(fed, hub, options(**chance.choice(FILTERS))))
                    case 3 if takers and chance.random() < 0.3:
                        await takers.pop(chance.randrange(len(takers))).finish()
                    case _ if takers:
                        chance.choice(takers).take()
                await moments(chance.randrange(3))
            for taker in takers:
                await taker.finish()
            assert not hub._groups and not len(hub._router._filters)

    in_loop(work)


def test_change_is_encoded_and_framed_once_for_all_readers() -> None:
    async def work() -> None:
        fed = Fed()
        encoded: Counter[tuple[int, Op]] = Counter()
        framed: Counter[int | str] = Counter()

        def frame(id: int | str, word: str, data: bytes) -> bytes:
            framed[id] += 1
            return line(id, word, data)

        async with opened(fed) as hub:
            groups = [
                hub.join(hub.view(options(tables=("items",), **given)), frame)
                for given in ({}, {"where": "size > 2"}, {"where": "size = 4"}, {"ops": ("insert", "update")})
            ]
            assert len({id(group.view.encoder) for group in groups}) == 1
            real = groups[0].view.encoder.change

            def counted(part: Any, offset: int, change: Change, op: Op) -> bytes:
                encoded[offset, op] += 1
                return real(part, offset, change, op)

            groups[0].view.encoder.change = counted  # type: ignore[method-assign]
            fed.commit(insert(1, 4), insert(2, 1))
            fed.commit(Change(Op.UPDATE, insert(1).table, (1, 4, ""), (1, 5, "")))
            await settled(hub, fed)
            assert encoded == {(1, Op.INSERT): 1, (2, Op.INSERT): 1, (3, Op.UPDATE): 1, (3, Op.DELETE): 1}
            assert framed == {1: 1, 2: 1, 3: 2}
            assert [group.published for group in groups] == [3, 2, 2, 3]

    in_loop(work)


# --- large changes ---------------------------------------------------------------------------------------

DOCS = Table("docs", (Column("id", "i64", nullable=False), Column("doc", "json")), ("id",))
LARGE = Json('["' + "x" * batch_module.MOST_ENCODED + '"]')


class Encoding:
    """Records the thread that encodes each change; a large change is not encoded before `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self.threads: dict[tuple[int, Encoder], list[int]] = {}
        monkeypatch.setattr(Native, "change", self._recorded(Native.change))

    def _recorded(self, encode: Callable[..., bytes]) -> Callable[..., bytes]:
        def change(encoder: Native, part: Transaction, offset: int, change: Change, op: Op) -> bytes:
            self.threads.setdefault((offset, encoder), []).append(threading.get_ident())
            if image_bytes([change]) > batch_module.MOST_ENCODED:
                self.begun.set()
                assert self.go.wait(PATIENCE)
            return encode(encoder, part, offset, change, op)

        return change

    def of(self, offset: int) -> list[list[int]]:
        """Return for each encoder the threads that encoded the change at `offset`."""
        return [threads for (at, _), threads in self.threads.items() if at == offset]


def doc(id: int, value: Json) -> Change:
    return Change(Op.INSERT, DOCS, None, (id, value))


def test_large_change_is_encoded_in_a_thread_and_readers_receive_it_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = Encoding(monkeypatch)

    async def work() -> None:
        fed = Fed(DOCS)
        async with opened(fed, asyncio.to_thread) as hub:
            given = [
                options(),
                options(ops=("insert",)),
                options(format="plain_json"),
                options(pk=[{"t": "i64", "v": 2}]),
            ]
            takers = [Taker(fed, hub, each) for each in given]
            fed.commit(doc(1, Json("[]")), doc(2, LARGE), doc(3, Json("[]")))
            while not encoding.begun.is_set():
                await asyncio.sleep(0)  # the loop goes on while the change is encoded
            for taker in takers:
                taker.take()
                assert not taker.found
            fed.commit(doc(4, Json("[]")))
            encoding.go.set()
            while hub.upto < fed.log.latest:
                await asyncio.sleep(0)
            assert [len(threads) for threads in encoding.of(2)] == [1, 1]  # once for each format
            assert threading.get_ident() not in [thread for threads in encoding.of(2) for thread in threads]
            assert encoding.of(4) == [[threading.get_ident()]] * 2
            for taker in takers:
                await taker.finish()
                assert taker.fell_back == 0

    in_loop(work)


def test_readers_of_small_changes_join_while_a_large_one_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = Encoding(monkeypatch)

    async def work() -> None:
        fed = Fed(DOCS, ITEMS)
        async with opened(fed, asyncio.to_thread) as hub:
            first = Taker(fed, hub, options())
            fed.commit(doc(1, LARGE))
            while not encoding.begun.is_set():
                await asyncio.sleep(0)
            second = Taker(fed, hub, options(tables=("items",)))
            fed.commit(insert(1))
            encoding.go.set()
            for taker in (first, second):
                await taker.finish()

    in_loop(work)


def test_cached_views_are_bounded_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with opened(Fed()) as hub:
            wide = [options(tables=("items",), spans=[_span(n, key) for key in range(1000)]) for n in range(8)]
            seen = weakref.WeakSet(hub.view(each) for each in wide)
            gc.collect()
            assert 0 < len(seen) < 4
            last = hub.view(wide[-1])
            assert last in seen
            for key in range(40):
                hub.view(options(tables=("items",), pk=[{"t": "i64", "v": key}]))
            assert hub.view(wide[-1]) is last

    def _span(n: int, key: int) -> dict[str, Any]:
        return {"prefix": [{"t": "i64", "v": 100_000 * n + key}]}

    monkeypatch.setattr(hub_module, "VIEWS_BYTES", 2 << 20)
    in_loop(work)


def test_equal_views_share_a_group_and_others_do_not() -> None:
    async def work() -> None:
        fed = Fed()
        async with opened(fed) as hub:
            one, same = (hub.join(hub.view(options(tables=("items",))), line) for _ in range(2))
            other = hub.join(hub.view(options(tables=("names",))), line)
            framed = hub.join(hub.view(options(tables=("items",))), lambda id, word, data: data)
            assert one is same and len({one, other, framed}) == 3
            assert one.members == 2
            hub.leave(one)
            fed.commit(insert(1))
            await settled(hub, fed)
            assert same.published == 1

    in_loop(work)


@pytest.mark.parametrize("bound", ["KEPT_FRAMES", "KEPT_BYTES"])
def test_frames_in_memory_are_bounded_for_all_groups_together(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, bound, {"KEPT_FRAMES": 50, "KEPT_BYTES": 20_000}[bound])

    async def work() -> None:
        fed = Fed()
        async with opened(fed) as hub:
            groups = [hub.join(hub.view(options(**given)), line) for given in FILTERS]
            writer = Writer(fed, 1, largest=10)
            for _ in range(60):
                writer.write()
                await settled(hub, fed)
                held = [frame for group in groups for frame in group._frames]
                assert len(held) <= hub_module.KEPT_FRAMES
                assert sum(len(frame) for _, frame in held) == hub._frame_bytes <= hub_module.KEPT_BYTES
            assert groups[0].take(0) is None, "the oldest are gone"

    in_loop(work)


def test_groups_without_members_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "KEPT_FRAMES", 10)

    async def work() -> None:
        fed = Fed()
        async with opened(fed) as hub:
            stays = Taker(fed, hub, options())
            for id in range(30):
                group = hub.join(hub.view(options(tables=("items",), where=f"id = {id}")), line)
                fed.commit(insert(id))
                await settled(hub, fed)
                stays.take()
                hub.leave(group)
            assert set(hub._groups.values()) == {stays.group} and len(hub._router._filters) == 1
            assert not stays.fell_back
            assert len(hub._frame_groups) <= 10

    in_loop(work)


def test_changes_missed_at_a_reset_are_read_from_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub_module, "KEPT_FRAMES", 10)

    async def work() -> None:
        fed = Fed()
        async with opened(fed) as hub:
            slow = Taker(fed, hub, options())
            fed.commit(*(insert(id) for id in range(8)))
            await settled(hub, fed)
            slow.take()
            at = slow.cursor
            with monkeypatch.context() as patch:
                patch.setattr(hub, "_publish", _breaks)  # as if the database were unavailable
                fed.commit(*(insert(id) for id in range(8, 12)))
                await settled(hub, fed)
            fed.commit(*(insert(id) for id in range(12, 20)))  # drops the older frames one by one
            await settled(hub, fed)
            assert hub.epoch == 1 and slow.group.seek(at) is None, "the log has what was passed over"
            slow.take()
            slow.take()
            assert changes(slow.found) == fed.expected(slow.view)

    with caplog.at_level(logging.CRITICAL, "headwater.feeds"):
        in_loop(work)


async def _breaks(parts: object) -> None:
    raise RuntimeError("publishing broke")


def test_slow_streams_at_many_positions_do_not_multiply_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "PIECE", 10_000)

    async def work() -> None:
        fed = Fed()
        async with opened(fed) as hub:
            group = hub.join(hub.view(options()), line)
            fed.commit(*(insert(id, note="x" * 100) for id in range(300)))
            await settled(hub, fed)
            for seen in range(300):
                group.take(seen)
            assert sum(len(taken.piece) for taken in group._joined.values()) <= 10 * group_module.PIECE

    in_loop(work)


def test_pieces_are_near_the_size_limit_and_contain_all_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_module, "PIECE", 1000)

    async def work() -> None:
        fed = Fed()
        async with opened(fed) as hub:
            group = hub.join(hub.view(options()), line)
            fed.commit(*(insert(id) for id in range(50)))
            await settled(hub, fed)
            seen, frames = 0, []
            while piece := group.take(seen).piece:  # type: ignore[union-attr]
                assert len(piece) < 1000 + 400
                frames += frames_of(piece)
                seen = group.take(seen).seen  # type: ignore[union-attr]
            assert changes(frames) == fed.expected(group.view) and seen == 50

    in_loop(work)


def test_only_members_of_matching_groups_are_woken() -> None:
    async def work() -> None:
        fed = Fed()
        async with opened(fed) as hub:
            groups = {
                "items": hub.join(hub.view(options(tables=("items",))), line),
                "large": hub.join(hub.view(options(tables=("items",), where="size > 2")), line),
                "names": hub.join(hub.view(options(tables=("names",))), line),
                "updates": hub.join(hub.view(options(tables=("items",), ops=("update",))), line),
            }
            sleepers = {key: Sleeper() for key in (*groups, "batch")}

            def wait() -> None:
                for key, group in groups.items():
                    group.waiting.add(sleepers[key])
                hub.sleep(sleepers["batch"])

            async def woken() -> set[str]:
                await settled(hub, fed)
                found = {key for key, sleeper in sleepers.items() if sleeper.woken}
                for sleeper in sleepers.values():
                    sleeper.woken = 0
                return found

            wait()
            fed.commit(insert(1, 1))
            assert await woken() == {"items", "batch"}
            wait()
            fed.commit(insert(2, 3))
            assert await woken() == {"items", "large", "batch"}
            fed.commit(name("a"))
            assert await woken() == {"names"}, "a member that did not wait again is not woken"

    in_loop(work)


def test_drop_of_a_filter_column_ends_only_the_group_of_the_filter() -> None:
    async def work() -> None:
        fed = Fed()
        async with opened(fed) as hub:
            fails = hub.join(hub.view(options(tables=("items",), where="size > 2")), line)
            stays = Taker(fed, hub, options(tables=("items",)))
            sleeper = Sleeper()
            fails.waiting.add(sleeper)
            fed.commit(insert(1, 4))
            fed.commit(Change(Op.SCHEMA_CHANGE, WITHOUT_SIZE))
            fed.commit(Change(Op.INSERT, WITHOUT_SIZE, None, (2, "")))
            await settled(hub, fed)
            assert fails.failed is not None and "does not fit" in fails.failed.message
            assert sleeper.woken and hub.epoch == 0
            fed.commit(Change(Op.INSERT, WITHOUT_SIZE, None, (3, "")))
            await stays.finish()
            assert stays.fell_back == 0

    in_loop(work)


def test_member_after_a_failed_filter_gets_a_new_group() -> None:
    """A member left in the failed group must not keep new members from a group whose filter fits."""

    async def work() -> None:
        fed = Fed()
        async with opened(fed) as hub:
            asked = options(tables=("items",), where="size > 2")
            fails, stays = hub.join(hub.view(asked), line), hub.join(hub.view(options()), line)
            fed.commit(Change(Op.SCHEMA_CHANGE, WITHOUT_SIZE))
            fed.commit(Change(Op.INSERT, WITHOUT_SIZE, None, (2, "")))
            await settled(hub, fed)
            fed.commit(Change(Op.DELETE, WITHOUT_SIZE, (2, ""), None))
            fed.commit(Change(Op.SCHEMA_CHANGE, insert(1).table))
            await settled(hub, fed)
            fresh = hub.join(hub.view(asked), line)
            assert fails.failed is not None and fresh.failed is None
            fed.commit(insert(5, 5))
            await settled(hub, fed)
            assert fresh.published == 1
            for group in (fails, fresh, stays):
                hub.leave(group)
            assert not hub._groups and not len(hub._router._filters)

    in_loop(work)


def test_error_in_the_router_does_not_stop_publishing(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        fed = Fed()
        async with opened(fed) as hub:
            taker = Taker(fed, hub, options())
            real, sleeper, waits = hub._router.route, Sleeper(), Sleeper()
            taker.group.waiting.add(sleeper)
            hub.sleep(waits)

            def broken(changes: Any) -> Any:
                hub._router.route = real  # type: ignore[method-assign]
                raise ZeroDivisionError

            hub._router.route = broken  # type: ignore[method-assign]
            fed.commit(insert(1))
            await settled(hub, fed)
            assert hub.epoch == 1 and sleeper.woken == 1, "they look into the log themselves"
            assert waits.woken == 1, "so do the sleepers that waited for any change"
            fed.commit(insert(2))
            await taker.finish()
            assert taker.fell_back == 1

    with caplog.at_level(logging.CRITICAL, "headwater.feeds"):
        in_loop(work)


def test_new_generation_sends_every_stream_to_the_log() -> None:
    async def work() -> None:
        fed = Fed()
        async with opened(fed) as hub:
            group = hub.join(hub.view(options()), line)
            sleeper = Sleeper()
            fed.commit(insert(1))
            await settled(hub, fed)
            seen = group.seek(0)
            group.waiting.add(sleeper)
            fed.new_generation()
            fed.commit(insert(2))
            await settled(hub, fed)
            assert hub.epoch == 1 and sleeper.woken
            assert seen == 0 and group.seek(1) is None, "an old cursor finds no frames from before the reset"
            began = hub.upto
            fed.commit(insert(3))
            await settled(hub, fed)
            taken = group.take(group.seek(began) or 0)
            assert taken is not None and changes(frames_of(taken.piece)) == fed.expected(group.view, after=began)

    in_loop(work)


def test_transaction_that_is_not_in_memory_is_read_in_a_thread() -> None:
    async def work() -> None:
        fed = Fed(part=50, keep_changes=40)
        calls: list[str] = []

        async def noted(call: Any, *args: Any) -> Any:
            calls.append(call.__name__)
            return await run(call, *args)

        async with opened(fed, noted) as hub:
            taker = Taker(fed, hub, options(tables=("items",), where="size = 7"))
            fed.commit(*(insert(id, id % 9) for id in range(3000)))
            fed.commit(insert(9999, 7))
            await taker.finish()
            assert "_read" in calls and len(taker.found) == 334

    in_loop(work)


def test_checkpoint_inside_a_transaction_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "BATCH", 10)

    async def work() -> None:
        fed = Fed()
        async with opened(fed) as hub:
            hub.join(hub.view(options()), line)
            ends = {}
            for first in range(0, 140, 7):
                fed.commit(*(insert(id) for id in range(first, first + 7)))
                ends[fed.log.latest] = (first + 1) << 16
            seen = set()
            while hub.upto < fed.log.latest:
                await asyncio.sleep(0)
                found = hub.checkpoint()
                assert found is None or found[1] == hub.upto
                if hub.upto not in ends and hub.upto:
                    assert found is None
                elif found is not None and hub.upto < fed.log.latest:
                    assert found[0] == ends[hub.upto]
                seen.add(found is None)
            assert seen == {True, False}
            assert hub.checkpoint() == fed.log.closed

    in_loop(work)


def test_hub_without_groups_publishes_nothing_and_the_first_group_joins_at_the_head() -> None:
    async def work() -> None:
        fed = Fed()
        async with opened(fed) as hub:
            fed.commit(insert(1))
            await moments(5)
            assert hub.upto == 0
            taker = Taker(fed, hub, options())
            assert taker.began == 1
            fed.commit(insert(2))
            await taker.finish()
            assert [found.id for found in taker.found] == ["2"]

    in_loop(work)


def test_group_that_joins_while_a_thread_reads_receives_only_later_changes() -> None:
    async def work() -> None:
        fed = Fed(part=4, keep_changes=4)
        held = asyncio.Event()

        async def slow(call: Any, *args: Any) -> Any:
            found = call(*args)
            if call.__name__ == "_read":
                await held.wait()
            return found

        async with opened(fed, slow) as hub:
            first = hub.join(hub.view(options()), line)
            fed.commit(*(insert(id) for id in range(20)))
            await moments(5)
            hub.leave(first)
            fed.commit(insert(30))
            second = Taker(fed, hub, options())
            assert second.began == 21
            held.set()
            fed.commit(insert(31))
            await second.finish()
            assert [found.id for found in second.found] == ["22"]

    in_loop(work)


def test_closed_hub_no_longer_listens_to_the_log() -> None:
    async def work() -> None:
        fed = Fed()
        async with opened(fed):
            assert fed.log.has_listeners
        assert not fed.log.has_listeners
        fed.commit(insert(1))

    in_loop(work)


def test_group_seek_finds_the_position_of_any_cursor_in_memory() -> None:
    async def work() -> None:
        fed = Fed()
        async with opened(fed) as hub:
            fed.commit(insert(0))
            group: Group = hub.join(hub.view(options(tables=("items",))), line)
            for id in range(1, 6):
                fed.commit(insert(id), name(f"n{id}"))
            await settled(hub, fed)
            assert [group.seek(cursor) for cursor in range(13)] == [None, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5]

    in_loop(work)


# --- loop time of one batch ----------------------------------------------------------------------------------


class Ticking:
    """A clock that advances by `step` seconds at every reading."""

    def __init__(self, step: float) -> None:
        self.step, self.now = step, 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class Threads:
    """Runs calls like `run` and counts those that decide filters."""

    def __init__(self) -> None:
        self.decided = 0

    async def __call__(self, call: Any, *args: Any) -> Any:
        self.decided += getattr(call, "__func__", None) is batch_module.SlowFilters.run
        return await run(call, *args)


def test_filter_that_took_long_in_the_loop_is_decided_in_a_thread_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        fed, threads = Fed(), Threads()
        async with opened(fed, threads) as hub:
            slow = Taker(fed, hub, options(tables=("items",), where="size > 2"))
            with monkeypatch.context() as patch:
                patch.setattr(hub_module, "thread_time", Ticking(hub_module.SHARE_SECONDS * 2))
                fed.commit(insert(1, 3))
                await settled(hub, fed)
            quick = Taker(fed, hub, options(tables=("items",), where="size > 1"))
            assert threads.decided == 0 and slow.view.is_costly and not quick.view.is_costly
            fed.commit(insert(2, 3))
            await slow.finish()
            await quick.finish()
            assert threads.decided == 1 and slow.fell_back == quick.fell_back == 0

    in_loop(work)


def balanced(terms: list[str]) -> str:
    """Join all terms with the least nesting."""
    half = len(terms) // 2
    return f"({balanced(terms[:half])}AND{balanced(terms[half:])})" if half else f"({terms[0]})"


@pytest.mark.parametrize(
    ("terms", "rows", "note", "threads"),
    [(1, 1, "", 0), (1, 900, "", 0), (600, 1, "", 0), (600, 900, "", 1), (100, 1, "x" * 1_000_000, 1)],
)
def test_long_filter_over_many_or_large_rows_is_decided_in_a_thread_at_once(
    terms: int, rows: int, note: str, threads: int
) -> None:
    async def work() -> None:
        fed, found = Fed(part=1024), Threads()
        where = balanced([f"size<>{number}" for number in range(1, terms + 1)])
        async with opened(fed, found) as hub:
            taker = Taker(fed, hub, options(tables=("items",), where=where))
            for number in range(hub_module.FEW):  # with few streams the hub does not publish many changes
                hub.join(hub.view(options(tables=("names",), where=f"size = {number}")), line)
            assert taker.view.filter.is_cheap(insert(1).table)
            fed.commit(*(insert(id, note=note) for id in range(rows)))
            await taker.finish()
            assert found.decided == threads

    in_loop(work)


def test_publishing_to_many_groups_yields_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "perf_counter", Ticking(hub_module.TURN_SECONDS * 2))

    async def work() -> None:
        fed, turns = Fed(), 0
        async with opened(fed) as hub:
            takers = [Taker(fed, hub, options(tables=("items",), where=f"size > {-n}")) for n in range(30)]
            before = hub.upto
            fed.commit(insert(1, 3))
            while hub.upto == before:
                assert not any(taker.group.published for taker in takers), "all at once, or a cursor passes over some"
                await asyncio.sleep(0)
                turns += 1
            assert all(taker.group.published == 1 for taker in takers)
            assert turns >= 2 * len(takers), "after each filter and each encoding"

    in_loop(work)


def test_changes_for_many_groups_are_published_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MOST_ROUTED", 20)

    async def work() -> None:
        fed = Fed()
        async with opened(fed) as hub:
            takers = [Taker(fed, hub, options(tables=("items",), where=f"size > {-n}")) for n in range(1, 9)]
            fed.commit(insert(1))
            fed.commit(*(insert(id) for id in range(2, 10)))
            passed = {hub.upto}
            while hub.upto < fed.log.latest:
                await asyncio.sleep(0)
                passed.add(hub.upto)
            assert passed == {0, 2, 4, 6, 8, 9}, "two changes for eight groups at a time"
            for taker in takers:
                await taker.finish()

    in_loop(work)


def test_new_filters_with_many_values_are_indexed_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MOST_INDEXED", 10)

    async def work() -> None:
        fed, turns = Fed(), 0
        async with opened(fed) as hub:
            wheres = [f"size in ({', '.join(map(str, range(n, n + 20)))})" for n in range(8)]
            takers = [Taker(fed, hub, options(tables=("items",), where=where)) for where in wheres]
            fed.commit(insert(1, 10))
            while hub.upto < fed.log.latest:
                await asyncio.sleep(0)
                turns += 1
            assert turns >= len(takers)
            for taker in takers:
                await taker.finish()
                assert len(taker.found) == 1

    in_loop(work)


def test_batch_of_many_shapes_is_encoded_up_to_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "KEPT_BYTES", 20_000)

    async def work() -> None:
        fed, made = Fed(), Counter[str]()

        def frame(number: int) -> Any:
            def framed(id: int | str, word: str, data: bytes) -> bytes:
                made["bytes"] += len(data)
                return line(id, word, data)

            return framed

        async with opened(fed) as hub:
            taker = Taker(fed, hub, options(tables=("items",)))
            groups = [hub.join(taker.view, frame(number)) for number in range(50)]
            for first in (0, 10):
                fed.commit(*(insert(id, note="x" * 300) for id in range(first, first + 10)))
                await settled(hub, fed)
                assert 10_000 < made["bytes"] < 30_000
                made.clear()
                held = [frame for group in [*groups, taker.group] for frame in group._frames]
                assert sum(len(frame) for _, frame in held) == hub._frame_bytes <= hub_module.KEPT_BYTES
                assert groups[-1].take(0) is None, "the last read the log"
                for group in groups:
                    assert group.seek(hub.upto) == group.published
                taker.take()
            assert not taker.fell_back
            fed.commit(insert(99))
            await settled(hub, fed)
            assert [group.take(group.published - 1) is not None for group in groups] == [True] * 50
            await taker.finish()

    in_loop(work)


def test_group_whose_members_read_nothing_is_suspended_and_rejoins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "KEPT_FRAMES", 20)

    async def work() -> None:
        fed = Fed()
        async with opened(fed) as hub:
            reads, stalled = (Taker(fed, hub, options(where=where)) for where in ("size > 0", "size > 1"))
            for id in range(30):
                fed.commit(insert(id, 3))
                await settled(hub, fed)
                reads.take()
            assert stalled.group.is_suspended and not stalled.group._frames
            assert set(hub._groups.values()) == {reads.group}
            stalled.take()
            assert stalled.fell_back == 1 and stalled.group in hub._groups.values()
            fed.commit(insert(30, 3))
            for taker in (reads, stalled):
                await taker.finish()
            assert (reads.fell_back, stalled.fell_back) == (0, 1)

    in_loop(work)


def test_new_and_stored_frames_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "KEPT_BYTES", 20_000)

    async def work() -> None:
        fed, made, most = Fed(), Counter[str](), 0
        async with opened(fed) as hub:

            def frame(id: int | str, word: str, data: bytes) -> bytes:
                nonlocal most
                found = line(id, word, data)
                most = max(most, made["bytes"] + hub._frame_bytes)
                made["bytes"] += len(found)
                return found

            given = [options(tables=("items",), where=f"size > {-n}") for n in range(30)]
            groups = [hub.join(hub.view(each), lambda *of, n=n: frame(*of)) for n, each in enumerate(given)]
            for id in range(20):
                fed.commit(insert(id, 3, note="x" * 300))
                await settled(hub, fed)
                for group in groups:
                    group.seek(hub.upto)
                made.clear()
            assert all(group.is_live for group in groups)
            assert 10_000 < most <= 20_000

    in_loop(work)


def test_joined_frames_are_cached_only_for_several_members() -> None:
    async def work() -> None:
        fed = Fed()
        async with opened(fed) as hub:
            alone = hub.join(hub.view(options()), line)
            shared, _ = (hub.join(hub.view(options(tables=("items",))), line) for _ in range(2))
            fed.commit(insert(1), insert(2))
            await settled(hub, fed)
            assert alone.take(0) == alone.take(0) and not alone._joined
            assert shared.take(0) is shared.take(0)

    in_loop(work)
