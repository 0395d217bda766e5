"""Invalidations: one per relevant transaction, at its last relevant change, equal from the hub and from the log."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from tests.feeds.feed_database import (
    ITEMS,
    WIDER,
    Fed,
    ReceivedFrame,
    Writer,
    frames_of,
    hesitant,
    in_loop,
    insert,
    line,
    run,
    settled,
)
from tests.feeds.query_feeds.fake_queries import Fake, groups, options, view

from headwater.errors import OffsetExpired
from headwater.feeds.deliver import hub as hub_module
from headwater.feeds.deliver.hub import Hub
from headwater.feeds.groups.log_reader import Page
from headwater.feeds.query_feeds import relevant_changes
from headwater.feeds.query_feeds.answer_confirmation import AnswerConfirmation
from headwater.feeds.query_feeds.query_view import QueryView
from headwater.model.change import Change, Op
from headwater.model.query.query import AnswerHash


def update(old: Change, **new: Any) -> Change:
    assert old.row is not None
    row = {"id": old.row[0], "size": old.row[1], "note": old.row[2]} | new
    return Change(Op.UPDATE, ITEMS, old.row, tuple(row.values()))


def everything(fed: Fed, seen: QueryView, *, after: int = 0, limit: int = 1000) -> list[tuple[int, bytes]]:
    """Read all invalidations page by page; return offset and bytes of each."""
    found: list[tuple[int, bytes]] = []
    while after < fed.log.latest:
        page: Page = seen.page(fed.log, after=after, limit=limit, most=1 << 20)
        assert page.upto > after
        after = page.upto
        found += [(offset, data) for offset, _, data in page.deliveries]
    return found


def offsets(found: list[tuple[int, bytes]]) -> list[int]:
    return [offset for offset, _ in found]


def test_each_transaction_is_one_invalidation_at_its_last_relevant_change() -> None:
    fed, instance = Fed(), Fake(holds=lambda row: row[1] == 1)
    fed.commit(insert(1, 1), insert(2, 1), insert(3, 0))
    fed.commit(insert(4, 0))
    fed.commit(insert(5, 1))
    found = everything(fed, view(fed, instance))
    assert offsets(found) == [2, 5]
    body = json.loads(found[0][1])
    assert body["op"] == "invalidate" and body["pk"] == [2] and body["txn"] == {"id": "1", "seq": 1, "last": False}
    assert body["etag"] == body["new_etag"] == '"p0.2"'
    assert body["changed_keys"] == {"items": [[1], [2]]} and "changed_keys_cut" not in body


def test_invalidation_fields_are_in_order() -> None:
    fed = Fed()
    fed.commit(insert(1, 1, "a"))
    ((_, data),) = everything(fed, view(fed, Fake(), after=True))
    names = "seq db table op pk after query_id etag commit_ts_ms lsn offset ts txn schema new_etag changed_keys reason"
    assert list(json.loads(data)) == names.split()


@pytest.mark.parametrize("cursor", range(7))
def test_reader_inside_a_transaction_receives_all_its_keys(cursor: int) -> None:
    fed, instance = Fed(part=2), Fake(holds=lambda row: row[1] == 1)
    fed.commit(insert(1, 1), insert(2, 0), insert(3, 1), insert(4, 0), insert(5, 0))
    whole = everything(fed, view(fed, instance))
    assert offsets(whole) == [3]
    assert everything(fed, view(fed, instance), after=cursor) == (whole if cursor < 3 else [])


@pytest.mark.parametrize(
    ("filter_", "passes"),
    [
        ({"pk": [{"t": "i64", "v": 1}]}, True),
        ({"pk": [{"t": "i64", "v": 2}]}, True),
        ({"pk": [{"t": "i64", "v": 3}]}, False),  # the change is not relevant to the instance
        ({"where": "size = 0"}, False),
        ({"ops": ("delete",)}, False),
        ({"ops": ("insert", "delete")}, True),
        ({"columns": ("note",)}, True),
    ],
)
def test_filter_passes_if_any_relevant_change_passes(filter_: dict[str, Any], passes: bool) -> None:
    fed, instance = Fed(), Fake(holds=lambda row: row[1] == 1)
    fed.commit(insert(1, 1), insert(2, 1), insert(3, 0))
    found = everything(fed, view(fed, instance, tables=("items",), **filter_))
    assert offsets(found) == ([2] if passes else [])


def test_image_outside_the_filter_is_not_sent() -> None:
    fed = Fed()
    fed.commit(insert(1, 1), insert(2, 1))
    shown = view(fed, Fake(), tables=("items",), after=True, pk=[{"t": "i64", "v": 1}])
    ((offset, data),) = everything(fed, shown)
    assert offset == 2 and "after" not in json.loads(data)


def test_changed_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relevant_changes, "MOST_KEYS", 3)
    fed = Fed()
    fed.commit(*(insert(id) for id in range(5)))
    ((_, data),) = everything(fed, view(fed, Fake()))
    body = json.loads(data)
    assert body["changed_keys"] == {"items": [[0], [1], [2]]} and body["changed_keys_cut"] is True


def test_schema_change_invalidates_and_ends_the_page_until_analysed_again() -> None:
    fed, instance = Fed(), Fake(holds=lambda row: row[1] == 1)
    fed.commit(insert(1, 1))
    fed.commit(Change(Op.SCHEMA_CHANGE, WIDER, ddl="ALTER TABLE items ADD COLUMN more TEXT"))
    fed.commit(Change(Op.INSERT, WIDER, None, (2, 1, "", "")))
    seen = view(fed, instance)
    page = seen.page(fed.log, after=0, limit=100, most=1 << 20)
    assert [delivery.offset for delivery in page.deliveries] == [1, 2] and page.upto == 2 and seen.is_outdated
    assert json.loads(page.deliveries[1].data)["ddl"].startswith("ALTER")
    seen.set_instance(Fake(head=2))
    assert offsets(everything(fed, seen, after=2)) == [3]
    assert not seen.is_outdated


def test_instance_advances_over_the_irrelevant_beginning_of_a_huge_transaction() -> None:
    fed, instance = Fed(part=10), Fake(holds=lambda row: row[0] == 99)
    fed.commit(*(insert(id) for id in range(100)))
    page = view(fed, instance).page(fed.log, after=0, limit=10, most=1 << 20, scan=20)
    assert not page.deliveries and 20 <= page.upto < 100
    assert offsets(everything(fed, view(fed, instance), after=page.upto)) == [100]


def test_evicted_offset_is_reported() -> None:
    fed = Fed(retention=2)
    for id in range(5):
        fed.commit(insert(id))
    with pytest.raises(OffsetExpired):
        view(fed, Fake()).page(fed.log, after=0, limit=10, most=1 << 20)


# --- live -----------------------------------------------------------------------------------------------------


class Taker:
    """Takes frames from a group, and reads the log when it has to."""

    def __init__(self, fed: Fed, hub: Hub, instance: Fake, **given: Any) -> None:
        self.fed, self.hub = fed, hub
        self.view = hub.view(options(instance, **given), instance)
        self.group = hub.join(self.view, line)
        self.began = self.cursor = fed.log.latest
        self.seen = self._place()
        self.found: list[ReceivedFrame] = []

    def _place(self) -> int | None:
        return self.group.seek(self.cursor) if self.cursor <= self.hub.reached(self.view) else None

    def take(self) -> None:
        taken = None if self.seen is None else self.group.take(self.seen)
        if taken is None:
            self.seen = None
            page = self.view.page(self.fed.log, after=self.cursor, limit=3, most=1 << 20)
            self.found += [ReceivedFrame(str(offset), op.word, data) for offset, op, data in page.deliveries]
            self.cursor = page.upto
            self.seen = self._place()
        elif taken.piece:
            self.found += frames_of(taken.piece)
            self.seen = taken.seen
            self.cursor = taken.offset

    async def finish(self) -> None:
        await settled(self.hub, self.fed)
        for _ in range(10_000):
            self.take()
            if self.seen == self.group.published:
                break
        self.hub.leave(self.group)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_live_and_logged_invalidations_have_the_same_bytes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "BATCH", 7)
    monkeypatch.setattr(hub_module, "KEPT_FRAMES", 12 if seed % 3 == 0 else 10_000)
    given: tuple[dict[str, Any], ...] = (
        {},
        {"before": True, "after": True},
        {"tables": ("items",), "where": "size > 2"},
        {"tables": ("items",), "pk": [{"t": "i64", "v": 3}], "after": True},
        {"ops": ("delete",)},
        {"format": "objects_json"},
        {"format": "cloudevents_json"},
    )

    async def work() -> None:
        chance = random.Random(seed)
        fed = Fed(part=5)
        writer = Writer(fed, seed, largest=25)
        known = [Fake(holds=lambda row, size=size: row[1] == size, key=size) for size in range(4)]
        known.append(Fake("names", key=9))
        if seed % 2:
            known[0].steady_from = known[1].steady_from = 1 << 60  # the check takes a while and finds nothing
        hub = Hub(fed.log, fed.source, hesitant(seed), groups(*known))
        takers: list[Taker] = []
        for _ in range(120):
            match chance.randrange(5):
                case 0 | 1:
                    writer.write()
                case 2 if len(takers) < 12:
                    takers.append(Taker(fed, hub, chance.choice(known), **chance.choice(given)))
                case _ if takers:
                    chance.choice(takers).take()
                    await run(lambda: None)
        for taker in takers:
            await taker.finish()
            expected = everything(fed, taker.view, after=taker.began)  # type: ignore[arg-type]
            assert [(int(one.id), one.body) for one in taker.found] == expected, f"seed {seed}"
            assert all(one.word == "invalidate" for one in taker.found)
        await hub.close()

    in_loop(work)


def test_many_instances_cost_one_routing_per_change() -> None:
    async def work() -> None:
        fed = Fed()
        known = [Fake(holds=lambda row, id=id: row[0] == id, key=id) for id in range(200)]
        asked = groups(*known)
        hub = Hub(fed.log, fed.source, run, asked)
        takers = [Taker(fed, hub, one) for one in known]
        fed.commit(*(insert(id) for id in range(20)))
        await settled(hub, fed)
        assert asked._routes.routed == 20  # type: ignore[attr-defined]
        for taker in takers:
            taker.take()
        assert [len(taker.found) for taker in takers] == [1] * 20 + [0] * 180
        await hub.close()

    in_loop(work)


def test_transaction_relevant_to_many_instances_is_published_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MOST_ROUTED", 20)

    async def work() -> None:
        fed, known = Fed(), [Fake(key=number) for number in range(8)]
        hub = Hub(fed.log, fed.source, run, groups(*known))
        takers = [Taker(fed, hub, one) for one in known]
        fed.commit(*(insert(id) for id in range(10)))
        passed = {hub.upto}
        while hub.upto < fed.log.latest:
            await asyncio.sleep(0)
            passed.add(hub.upto)
        assert passed == {0, 2, 4, 6, 8, 10}, "two changes for eight instances at a time"
        for taker in takers:
            taker.take()
            assert [one.id for one in taker.found] == ["10"]
        await hub.close()

    in_loop(work)


def test_reader_never_advances_into_an_unfinished_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub publishes a large transaction in steps; a cursor that moved with them would skip its invalidation."""
    monkeypatch.setattr(hub_module, "BATCH", 2)

    async def work() -> None:
        fed, instance = Fed(part=2), Fake(holds=lambda row: row[0] == 0)
        hub = Hub(fed.log, fed.source, run, groups(instance))
        taker = Taker(fed, hub, instance)
        fed.commit(*(insert(id) for id in range(20)))
        stood = set()
        while hub.upto < fed.log.latest:
            stood.add((hub.upto, hub.reached(taker.view)))
            await run(lambda: None)
        await settled(hub, fed)
        assert len(stood) > 3 and {reached for _, reached in stood} == {0}
        taker.take()
        assert [one.id for one in taker.found] == ["1"] and hub.reached(taker.view) == 20
        await hub.close()

    in_loop(work)


@pytest.mark.parametrize(
    ("steady", "delivered"), [(None, [2, 4, 5]), (5, [2, 4, 5]), (4, [2, 4]), (3, [2, 4]), (2, [2]), (1, [2]), (0, [])]
)
def test_transaction_with_an_unchanged_result_is_not_delivered(steady: int | None, delivered: list[int]) -> None:
    """The transactions are (1, 2), (3, 4) and (5): the one that contains `steady` and those before it are delivered."""

    async def work() -> None:
        fed, instance = Fed(), Fake()
        instance.steady_from = steady
        hub = Hub(fed.log, fed.source, run, groups(instance))
        taker = Taker(fed, hub, instance)
        fed.commit(insert(1), insert(2))
        fed.commit(insert(3), insert(4))
        fed.commit(insert(5))
        await settled(hub, fed)
        taker.take()
        assert [int(one.id) for one in taker.found] == delivered
        assert hub.reached(taker.view) == 5
        replayed = everything(fed, taker.view)  # type: ignore[arg-type]
        assert offsets(replayed) == [2, 4, 5]
        await hub.close()

    in_loop(work)


def test_large_transaction_with_an_unchanged_result_is_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last part has no relevant change, and the transaction nevertheless ends there."""
    monkeypatch.setattr(hub_module, "BATCH", 2)

    async def work() -> None:
        fed, instance = Fed(part=2), Fake(holds=lambda row: row[0] < 3)
        instance.steady_from = 0
        hub = Hub(fed.log, fed.source, run, groups(instance))
        taker = Taker(fed, hub, instance)
        fed.commit(*(insert(id) for id in range(20)))
        await settled(hub, fed)
        taker.take()
        assert not taker.found and hub.reached(taker.view) == 20
        await hub.close()

    in_loop(work)


def test_invalidation_is_delivered_if_the_result_may_have_changed() -> None:
    class Broken(Fake):
        is_guarded = True

        def steady(self, upto: int) -> int | None:
            raise OffsetExpired(0, 1, upto)

    async def work() -> None:
        fed, instance = Fed(), Broken()
        hub = Hub(fed.log, fed.source, run, groups(instance))
        taker = Taker(fed, hub, instance)
        fed.commit(insert(1))
        await settled(hub, fed)
        taker.take()
        assert [one.id for one in taker.found] == ["1"]
        await hub.close()

    in_loop(work)


# --- confirmation ---------------------------------------------------------------------------------------------


def test_result_known_to_be_unchanged_is_not_read_again() -> None:
    fed, instance = Fed(), Fake()
    for id in range(1, 5):
        fed.commit(insert(id))
    seen = confirmed(fed, instance, (1, b"a"), (4, b"a"))
    assert seen.confirmation is not None
    seen.confirmation.prime(instance)
    instance.steady_from = 1
    assert offsets(everything(fed, seen, after=1)) == []
    assert len(instance.answers) == 1, "the query did not run"
    instance.steady_from = None
    fed.commit(insert(5))
    instance.answers = [AnswerHash(5, b"a")]
    assert offsets(everything(fed, seen, after=1)) == [], "the answer before it is the one that was known"


def test_steady_result_of_an_earlier_offset_does_not_suppress_a_later_invalidation() -> None:
    fed, instance = Fed(), Fake()
    for id in range(1, 4):
        fed.commit(insert(id))
    seen = confirmed(fed, instance, (1, b"a"), (3, b"a"))
    assert seen.confirmation is not None
    seen.confirmation.prime(instance)
    instance.steady_from = 2  # the change at 2 is delivered, and the result may differ since then
    assert offsets(everything(fed, seen, after=2)) == []
    instance.steady_from = None
    fed.commit(insert(4))
    instance.answers = [AnswerHash(4, b"a")]
    assert offsets(everything(fed, seen, after=3)) == [4]


def confirmed(fed: Fed, instance: Fake, *answers: tuple[int, bytes] | None) -> QueryView:
    instance.answers = [None if one is None else AnswerHash(*one) for one in answers]
    return QueryView(options(instance, confirm=True), fed.source, instance, confirmation=AnswerConfirmation())


def test_unchanged_result_suppresses_the_invalidation() -> None:
    fed, instance = Fed(), Fake()
    fed.commit(insert(1))
    fed.commit(insert(2))
    fed.commit(insert(3))
    seen = confirmed(fed, instance, (1, b"a"), (2, b"a"), (3, b"b"))
    assert offsets(everything(fed, seen)) == [1, 3], "the first is delivered: no result was known before"
    assert offsets(everything(fed, seen)) == [1, 3], "what was found is remembered"


def test_two_changes_between_equal_results_are_delivered() -> None:
    """A client may have run the query between the two changes and hold the different result."""
    fed, instance = Fed(), Fake()
    for id in range(3):
        fed.commit(insert(id))
    seen = confirmed(fed, instance, (1, b"a"), (3, b"a"))
    assert offsets(everything(fed, seen)) == [1, 2, 3]


def test_invalidation_is_delivered_if_results_cannot_be_compared() -> None:
    fed, instance = Fed(), Fake()
    for id in range(3):
        fed.commit(insert(id))
    assert offsets(everything(fed, confirmed(fed, instance, (1, b"a"), None, (3, b"a")))) == [1, 2, 3]


def test_new_analysis_of_a_query_forgets_its_known_results() -> None:
    fed, instance = Fed(), Fake()
    fed.commit(insert(1))
    seen = confirmed(fed, instance, (1, b"a"))
    everything(fed, seen)
    other = Fake(key="other")
    other.answers = [AnswerHash(2, b"a")]
    seen.set_instance(other)
    fed.commit(insert(2))
    assert offsets(everything(fed, seen, after=1)) == [2]
