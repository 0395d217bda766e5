"""Arrow batches of changes: the pieces form one complete IPC stream of the passing changes of one table version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pyarrow as pa
import pytest
from tests.feeds.feed_database import ITEMS, WIDER, Fed, Writer, in_loop, insert, moments, name, run, settled
from tests.suite.deadlines import PATIENCE

from headwater.errors import OffsetExpired
from headwater.feeds import arrow_batches as batches_module
from headwater.feeds.arrow_batches import Batches
from headwater.feeds.deliver.consumer import Consumer
from headwater.feeds.deliver.hub import Hub
from headwater.feeds.options import Options
from headwater.model.change import Change, Op


class Place:
    def __init__(self, fed: Fed, hub: Hub) -> None:
        self.fed, self.hub = fed, hub

    def batches(self, *, cursor: int = 0, upto: int | None = None, **given: Any) -> Batches:
        asked = Options(db="main", tables=("items",), before=True, after=True, **given)
        consumer = Consumer(self.fed, self.hub, self.hub.view(asked), run, None)  # type: ignore[arg-type]
        return Batches(consumer, cursor=cursor, upto=upto)


@asynccontextmanager
async def place(fed: Fed) -> AsyncIterator[Place]:
    hub = Hub(fed.log, fed.source, run)
    try:
        yield Place(fed, hub)
        assert not hub._groups, "the hub has no groups left"
    finally:
        await hub.close()


async def everything(batches: Batches) -> bytes:
    pieces = []
    while (piece := await batches.next()) is not None:
        pieces.append(piece)
    assert await batches.next() is None, "it ends once"
    return b"".join(pieces)


def read(data: bytes) -> pa.Table:
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()


def offsets(data: bytes) -> list[int]:
    return list(dict.fromkeys(read(data).column("_offset").to_pylist()))  # an update has two rows


@pytest.mark.parametrize("given", [{}, {"where": "size > 2"}, {"ops": ("insert", "delete")}, {"where": "size = 99"}])
def test_bounded_stream_has_all_passing_changes_and_a_proper_end(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_module, "ROWS", 10)
    monkeypatch.setattr(batches_module, "SCAN", 40)

    async def work() -> None:
        fed = Fed()
        Writer(fed, 3).write(80)
        async with place(fed) as here:
            for upto in (1, 33, fed.log.latest):
                batches = here.batches(upto=upto, **given)
                data = await everything(batches)
                expected = [found.offset for found in fed.expected(batches.consumer.view, upto=upto)]
                assert offsets(data) == expected and batches.deliveries == len(expected)

    in_loop(work)


def test_new_changes_are_sent_as_they_commit() -> None:
    async def work() -> None:
        fed = Fed()
        async with place(fed) as here:
            batches = here.batches()
            pieces: list[bytes] = []

            async def take() -> None:
                while (piece := await batches.next()) is not None:
                    pieces.append(piece)

            task = asyncio.create_task(take())
            for id in range(1, 4):
                fed.commit(name(f"n{id}"))
                fed.commit(insert(id))
                await settled(here.hub, fed)
                while len(pieces) < id:
                    await asyncio.sleep(0)
            batches.stop()
            await task
            assert offsets(b"".join(pieces)) == [2, 4, 6]

    in_loop(work)


def test_changed_columns_end_the_stream_and_the_next_stream_has_them() -> None:
    async def work() -> None:
        fed = Fed()
        fed.commit(insert(1))
        fed.commit(insert(2), Change(Op.SCHEMA_CHANGE, WIDER), Change(Op.INSERT, WIDER, None, (3, 0, "", "more")))
        fed.commit(Change(Op.INSERT, WIDER, None, (4, 0, "", "more")))
        async with place(fed) as here:
            first = here.batches()
            data = await everything(first)
            assert offsets(data) == [1, 2] and "more" not in read(data).column_names
            assert first.cursor == 2
            second = here.batches(cursor=first.cursor, upto=5)
            data = await everything(second)
            assert offsets(data) == [4, 5] and read(data).column("more").to_pylist() == ["more", "more"]

    in_loop(work)


def test_stream_without_changes_ends_properly() -> None:
    async def work() -> None:
        fed = Fed()
        fed.commit(name("a"))
        async with place(fed) as here:
            data = await everything(here.batches(upto=1))
            assert read(data).num_rows == 0 and {"id", "size", "note"} <= set(read(data).column_names)

    in_loop(work)


@pytest.mark.parametrize("how", ["stop", "leave", "dropped"])
@pytest.mark.parametrize("count", range(6))
def test_stopped_stream_ends_properly_at_any_time(how: str, count: int) -> None:
    async def work() -> None:
        fed = Fed()
        fed.commit(insert(1))
        async with place(fed) as here:
            batches = here.batches()
            task = asyncio.create_task(everything(batches))
            await moments(count)
            if how == "dropped":
                batches.consumer.closed = True
                batches.changed()
            else:
                getattr(batches, how)()
            assert offsets(await asyncio.wait_for(task, PATIENCE)) in ([], [1])

    in_loop(work)


@pytest.mark.parametrize("asleep", [False, True])
def test_evicted_cursor_raises_offset_expired(asleep: bool) -> None:
    async def work() -> None:
        fed = Fed(retention=5)
        async with place(fed) as here:
            fed.commit(insert(0))
            batches = here.batches()
            if asleep:
                await batches.next()
                task = asyncio.create_task(batches.next())
                await moments(5)
                fed.new_generation()
                with pytest.raises(OffsetExpired):
                    await asyncio.wait_for(task, PATIENCE)
            else:
                for id in range(1, 20):
                    fed.commit(insert(id))
                with pytest.raises(OffsetExpired):
                    await batches.next()

    in_loop(work)


def test_selective_filter_on_a_busy_log_is_not_evicted() -> None:
    async def work() -> None:
        fed = Fed(retention=20)
        async with place(fed) as here:
            batches = here.batches()
            task = asyncio.create_task(batches.next())
            await moments(5)
            for number in range(100):
                fed.commit(name(f"n{number}"))
                await settled(here.hub, fed)
            fed.commit(insert(1))
            piece = await asyncio.wait_for(task, PATIENCE)
            batches.stop()
            assert offsets((piece or b"") + await everything(batches)) == [101]

    in_loop(work)


def test_idle_stream_sends_an_empty_batch_without_any_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches_module, "PATIENCE_SECONDS", 0.01)

    async def work() -> None:
        fed = Fed()
        async with place(fed) as here:
            batches = here.batches()
            pieces = [await batches.next(), await batches.next()]
            batches.stop()
            assert all(pieces)
            assert read(b"".join(filter(None, pieces)) + await everything(batches)).num_rows == 0

    in_loop(work)


def test_images_match_the_delivered_op() -> None:
    async def work() -> None:
        fed = Fed()
        fed.commit(insert(1, 1))
        fed.commit(Change(Op.UPDATE, ITEMS, (1, 1, ""), (1, 9, "")))
        fed.commit(Change(Op.UPDATE, ITEMS, (1, 9, ""), (1, 2, "")))
        async with place(fed) as here:
            found = read(await everything(here.batches(upto=3, where="size > 5"))).to_pylist()
            assert [(row["_offset"], row["_change_type"]) for row in found] == [(2, "insert"), (3, "delete")]

    in_loop(work)


def test_large_rows_end_a_batch_before_the_row_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "BATCH_BYTES", 3_000)

    async def work() -> None:
        fed = Fed()
        fed.commit(*(insert(id, note="x" * 1_000) for id in range(10)))
        async with place(fed) as here:
            batches = here.batches(upto=10)
            pieces: list[bytes] = []
            while (piece := await batches.next()) is not None:
                pieces.append(piece)
            data = b"".join(pieces)
            with pa.ipc.open_stream(data) as reader:
                sizes = [batch.num_rows for batch in reader]
            assert offsets(data) == list(range(1, 11))
            assert sizes == [3, 3, 3, 1]

    in_loop(work)
