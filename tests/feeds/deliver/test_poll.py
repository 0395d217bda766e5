"""Polls: a page at once or as soon as a change passes; every event during the wait ends the poll."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.feeds.feed_database import WITHOUT_SIZE, Fed, Writer, in_loop, insert, moments, name, run, settled
from tests.suite.deadlines import PATIENCE

from headwater.errors import InvalidRequest, NotFound, TransactionTooLarge, Unavailable
from headwater.feeds.deliver import poll as polling
from headwater.feeds.deliver.consumer import Consumer
from headwater.feeds.deliver.hub import Hub
from headwater.feeds.deliver.poll import Poll, PollRequest
from headwater.feeds.groups import log_reader
from headwater.feeds.options import Options
from headwater.feeds.subscription import Subscription
from headwater.feeds.subscriptions.registry import Registry
from headwater.model.change import Change, Op
from headwater.model.principal import Principal

WHO = Principal("ann", "owner")
LONG = 20_000  # milliseconds: longer than any test may wait


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    made = Registry.open(tmp_path / "subscriptions.db")
    yield made
    made.close()


class Here:
    def __init__(self, fed: Fed, hub: Hub, registry: Registry) -> None:
        self.fed, self.hub, self.registry = fed, hub, registry

    def subscribe(self, **given: Any) -> Subscription:
        held, _ = self.registry.create(WHO, Options(db="main", **{"after": True, **given}), acked=self.fed.log.latest)
        return held

    def poll(self, held: Subscription, *, caught_up: bool = True, **asked: Any) -> Poll:
        consumer = Consumer(self.fed, self.hub, self.hub.view(held.options), run, self.registry, held)
        return Poll(consumer, PollRequest(**asked), caught_up=caught_up)

    async def answer(self, held: Subscription, **asked: Any) -> dict[str, Any]:
        return await self.poll(held, **asked).answer()

    async def waiting(self, held: Subscription, **asked: Any) -> tuple[Poll, asyncio.Task[dict[str, Any]]]:
        """Return a poll that sleeps."""
        poll = self.poll(held, wait_ms=LONG, **asked)
        task = asyncio.create_task(poll.answer())
        while poll._waiting._sleeping is None:
            await asyncio.sleep(0)
            assert not task.done()
        return poll, task


@asynccontextmanager
async def here(fed: Fed, registry: Registry) -> AsyncIterator[Here]:
    hub = Hub(fed.log, fed.source, run)
    try:
        yield Here(fed, hub, registry)
        assert not hub._groups, "the hub has no groups left"
    finally:
        await hub.close()


def offsets(page: dict[str, Any]) -> list[int]:
    return [json.loads(bytes(event))["offset"] for event in page["events"]]


def test_consecutive_polls_return_every_change(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed()
        async with here(fed, registry) as place:
            for given in ({}, {"tables": ("items",), "where": "size > 2"}, {"txn": "atomic"}):
                held = place.subscribe(**given)
                Writer(fed, 4).write(60)
                expected = [found.offset for found in fed.expected(place.hub.view(held.options), after=held.acked)]
                found, at = [], held.acked
                while at < fed.log.latest:
                    page = await place.answer(held, from_offset=at, limit=7)
                    found += offsets(page)
                    assert page["next_offset"] > at and page["latest_offset"] == fed.log.latest
                    at = page["next_offset"]
                    assert page["caught_up"] == (at == fed.log.latest)
                assert found == expected

    in_loop(work)


def test_poll_body_has_offsets_and_backpressure(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed(retention=100)
        async with here(fed, registry) as place:
            held = place.subscribe()
            fed.commit(insert(1))
            page = await place.answer(held)
            assert offsets(page) == [1]
            pressure = page.pop("backpressure")
            assert (pressure.state, pressure.lag, pressure.remaining_until_resnapshot, pressure.paused) == (
                "healthy",
                1,
                99,
                False,
            )
            assert list(page) == [
                "events",
                "next_offset",
                "earliest_offset",
                "latest_offset",
                "resnapshot_required",
                "caught_up",
            ]
            assert (page["next_offset"], page["earliest_offset"], page["latest_offset"]) == (1, 1, 1)
            assert page["resnapshot_required"] is False and page["caught_up"] is True

    in_loop(work)


# --- start position ------------------------------------------------------------------------------------------


def test_acked_changes_are_not_repeated_and_future_offsets_are_rejected(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed()
        async with here(fed, registry) as place:
            held = place.subscribe()
            for id in range(1, 7):
                fed.commit(insert(id))
            registry.ack(held.id, 3)
            assert offsets(await place.answer(held)) == [4, 5, 6]
            assert offsets(await place.answer(held, from_offset=1)) == [4, 5, 6]
            assert offsets(await place.answer(held, from_offset=5)) == [6]
            assert offsets(await place.answer(held, from_offset=6)) == []
            with pytest.raises(InvalidRequest, match="from_offset 7"):
                place.poll(held, from_offset=7)
            with pytest.raises(Unavailable):
                place.poll(held, from_offset=7, caught_up=False)

    in_loop(work)


# --- waiting -------------------------------------------------------------------------------------------------


def test_waiting_poll_is_woken_only_by_passing_changes(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed()
        async with here(fed, registry) as place:
            held = place.subscribe(tables=("items",))
            _, task = await place.waiting(held)
            fed.commit(name("a"))
            await settled(place.hub, fed)
            assert not task.done()
            fed.commit(insert(1))
            page = await task
            assert offsets(page) == [2] and page["next_offset"] == 2

    in_loop(work)


def test_waiting_poll_without_changes_answers_in_time_and_advances(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed()
        async with here(fed, registry) as place:
            held = place.subscribe(tables=("items",))
            poll = place.poll(held, wait_ms=1500)
            task = asyncio.create_task(poll.answer())
            await moments(5)
            fed.commit(name("a"), name("b"))
            page = await task
            assert page["events"] == [] and page["next_offset"] == 2 and page["caught_up"]
            assert held.cursor == 2 and held.acked == 0

    in_loop(work)


def test_poll_without_wait_answers_at_once(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed()
        async with here(fed, registry) as place:
            page = await place.answer(place.subscribe())
            assert page["events"] == [] and page["next_offset"] == 0 and page["earliest_offset"] == 0

    in_loop(work)


def test_waiting_poll_ends_at_pause_close_or_stop(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed()
        async with here(fed, registry) as place:
            held = place.subscribe()
            poll, task = await place.waiting(held)
            registry.set_paused(held.id, True)
            poll.changed()
            page = await task
            assert page["events"] == [] and page["backpressure"].state == "paused" and not page["caught_up"]
            registry.set_paused(held.id, False)
            poll, task = await place.waiting(held)
            poll.stop()
            assert (await task)["events"] == []
            poll, task = await place.waiting(held)
            poll.consumer.closed = True
            poll.changed()
            with pytest.raises(NotFound):
                await task

    in_loop(work)


def test_waiting_poll_keeps_waiting_if_nothing_changed(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed()
        async with here(fed, registry) as place:
            poll, task = await place.waiting(place.subscribe())
            poll.changed()
            await moments(10)
            assert not task.done() and poll._waiting._sleeping is not None
            poll.stop()
            await task

    in_loop(work)


def test_cancelled_poll_leaves_its_group(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed()
        async with here(fed, registry) as place:
            _, task = await place.waiting(place.subscribe())
            assert place.hub._groups
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    in_loop(work)


# --- selective filters, evicted polls --------------------------------------------------------------------------


def test_poll_advances_over_changes_that_do_not_pass(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed(retention=50)
        async with here(fed, registry) as place:
            held = place.subscribe(tables=("items",))
            for number in range(200):
                fed.commit(name(f"n{number}"))
                if number % 20 == 0:
                    page = await place.answer(held)
                    assert not page["resnapshot_required"]
                    assert page["next_offset"] == held.cursor == number + 1
            fed.commit(insert(1))
            assert offsets(await place.answer(held)) == [201]

    in_loop(work)


def test_waiting_poll_with_a_selective_filter_is_not_evicted(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed(retention=20)
        async with here(fed, registry) as place:
            held = place.subscribe(tables=("items",))
            _, task = await place.waiting(held)
            for number in range(100):
                fed.commit(name(f"n{number}"))
                await settled(place.hub, fed)
            fed.commit(insert(1), insert(2))
            page = await task
            assert not page["resnapshot_required"] and offsets(page) == [101, 102]

    in_loop(work)


def test_delivered_change_is_not_skipped_as_quiet(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed()
        async with here(fed, registry) as place:
            held = place.subscribe(tables=("items",))
            fed.commit(insert(1))
            fed.commit(name("a"))
            assert offsets(await place.answer(held)) == [1]
            page = await place.answer(held, from_offset=2)
            assert page["events"] == [] and held.cursor == 0, "it was not acked"
            assert offsets(await place.answer(held)) == [1]

    in_loop(work)


def test_long_stretch_without_matches_is_scanned_in_one_poll(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "SCAN", 16)
    monkeypatch.setattr(
        log_reader.View.page, "__kwdefaults__", {**(log_reader.View.page.__kwdefaults__ or {}), "scan": 16}
    )

    async def work() -> None:
        fed = Fed()
        async with here(fed, registry) as place:
            held = place.subscribe(tables=("items",))
            for number in range(100):
                fed.commit(name(f"n{number}"))
            fed.commit(insert(1))
            assert offsets(await place.answer(held)) == [101]
            monkeypatch.setattr(polling, "SCAN_SECONDS", -1.0)
            page = await place.answer(held)
            assert page["events"] == [] and 16 <= page["next_offset"] < 100 and not page["caught_up"]

    in_loop(work)


@pytest.mark.parametrize("paused", [False, True])
def test_evicted_poll_returns_resnapshot(paused: bool, registry: Registry) -> None:
    async def work() -> None:
        fed = Fed(retention=5)
        async with here(fed, registry) as place:
            held = place.subscribe(tables=("items",))
            for id in range(20):
                fed.commit(insert(id))
            if paused:
                registry.set_paused(held.id, True)
            page = await place.answer(held, wait_ms=LONG)
            assert page["resnapshot_required"] and page["resnapshot_reason"] == "wal_horizon_exceeded"
            assert page["resnapshot_from_offset"] == page["next_offset"] == 15
            assert page["snapshot_url"] == f"/api/v1/snapshot/main/items?version={fed.log.generation}.20"
            assert page["backpressure"].state == "resnapshot_required" and page["events"] == []

    in_loop(work)


def test_new_generation_is_reported_to_a_waiting_poll(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed()
        async with here(fed, registry) as place:
            held = place.subscribe()
            fed.commit(insert(1))
            registry.ack(held.id, 1)
            _, task = await place.waiting(held)
            fed.new_generation()
            page = await asyncio.wait_for(task, PATIENCE)
            assert page["resnapshot_reason"] == "log_generation_changed"

    in_loop(work)


# --- errors ------------------------------------------------------------------------------------------------------


def test_poll_returns_the_changes_before_the_drop_of_its_filter_column_and_then_fails(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed()
        async with here(fed, registry) as place:
            held = place.subscribe(tables=("items",), where="size > 2", ops=("insert",))
            _, task = await place.waiting(held)
            fed.commit(insert(1, 5))
            fed.commit(Change(Op.SCHEMA_CHANGE, WITHOUT_SIZE))
            fed.commit(Change(Op.INSERT, WITHOUT_SIZE, None, (2, "")))
            page = await asyncio.wait_for(task, PATIENCE)
            assert offsets(page) == [1]
            with pytest.raises(InvalidRequest, match="does not fit"):
                await place.answer(held, from_offset=page["next_offset"], wait_ms=LONG)

    in_loop(work)


def test_too_large_transaction_raises_in_an_atomic_strict_poll(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        log_reader.View.whole_page,
        "__kwdefaults__",
        {**(log_reader.View.whole_page.__kwdefaults__ or {}), "largest": 1000},
    )

    async def work() -> None:
        fed = Fed()
        async with here(fed, registry) as place:
            strict, atomic = place.subscribe(txn="atomic_strict"), place.subscribe(txn="atomic")
            fed.commit(*(insert(id) for id in range(20)))
            with pytest.raises(TransactionTooLarge):
                await place.answer(strict)
            found, at = [], 0
            while at < 20:
                page = await place.answer(atomic, from_offset=at, limit=1)
                found += offsets(page)
                at = page["next_offset"]
            assert found == list(range(1, 21))

    in_loop(work)


def test_transaction_stays_in_one_page_of_an_atomic_poll(registry: Registry) -> None:
    async def work() -> None:
        fed = Fed()
        async with here(fed, registry) as place:
            held = place.subscribe(txn="atomic")
            for first in (0, 10, 20):
                fed.commit(*(insert(id) for id in range(first, first + 5)))
            assert offsets(await place.answer(held, limit=2)) == [1, 2, 3, 4, 5]
            assert offsets(await place.answer(held, limit=12)) == list(range(1, 11))

    in_loop(work)
