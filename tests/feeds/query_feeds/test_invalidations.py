"""Invalidations: one for each transaction that matters, at its last such change, the same live and from the log."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tests.feeds.feed_database import (
    ITEMS,
    WIDER,
    Fed,
    Told,
    Writer,
    hesitant,
    in_loop,
    insert,
    line,
    run,
    settled,
    told,
)
from tests.feeds.query_feeds.fake_queries import Fake, groups, options, view

from headwater.errors import OffsetExpired
from headwater.feeds.deliver import hub as hub_module
from headwater.feeds.deliver.hub import Hub
from headwater.feeds.groups.log_reader import Page, read_page
from headwater.feeds.query_feeds import relevant_changes
from headwater.feeds.query_feeds.answer_confirmation import Confirming
from headwater.feeds.query_feeds.query_instances import Answered
from headwater.feeds.query_feeds.query_view import QueryView
from headwater.model.change import Change, Op


def update(old: Change, **new: Any) -> Change:
    assert old.row is not None
    row = {"id": old.row[0], "size": old.row[1], "note": old.row[2]} | new
    return Change(Op.UPDATE, ITEMS, old.row, tuple(row.values()))


def everything(fed: Fed, seen: QueryView, *, after: int = 0, limit: int = 1000) -> list[tuple[int, bytes]]:
    """Page by page, as a reader does."""
    found: list[tuple[int, bytes]] = []
    while after < fed.log.latest:
        page: Page = read_page(fed.log, seen, after=after, limit=limit, most=1 << 20)
        assert page.upto > after
        after = page.upto
        found += [(offset, data) for offset, _, data in page.deliveries]
    return found


def offsets(found: list[tuple[int, bytes]]) -> list[int]:
    return [offset for offset, _ in found]


def test_one_for_each_transaction_at_its_last_change_that_matters() -> None:
    fed, question = Fed(), Fake(holds=lambda row: row[1] == 1)
    fed.commit(insert(1, 1), insert(2, 1), insert(3, 0))
    fed.commit(insert(4, 0))
    fed.commit(insert(5, 1))
    found = everything(fed, view(fed, question))
    assert offsets(found) == [2, 5]
    body = json.loads(found[0][1])
    assert body["op"] == "invalidate" and body["pk"] == [2] and body["txn"] == {"id": "1", "seq": 1, "last": False}
    assert body["etag"] == body["new_etag"] == '"p0.2"'
    assert body["changed_keys"] == {"items": [[1], [2]]} and "changed_keys_cut" not in body


def test_the_fields_stand_in_their_order() -> None:
    fed = Fed()
    fed.commit(insert(1, 1, "a"))
    ((_, data),) = everything(fed, view(fed, Fake(), after=True))
    names = "seq db table op pk after query_id etag commit_ts_ms lsn offset ts txn schema new_etag changed_keys reason"
    assert list(json.loads(data)) == names.split()


@pytest.mark.parametrize("cursor", range(7))
def test_a_reader_in_the_midst_of_a_transaction_is_told_all_of_it(cursor: int) -> None:
    fed, question = Fed(part=2), Fake(holds=lambda row: row[1] == 1)
    fed.commit(insert(1, 1), insert(2, 0), insert(3, 1), insert(4, 0), insert(5, 0))
    whole = everything(fed, view(fed, question))
    assert offsets(whole) == [3]
    assert everything(fed, view(fed, question), after=cursor) == (whole if cursor < 3 else [])


@pytest.mark.parametrize(
    ("filter_", "passes"),
    [
        ({"pk": [{"t": "i64", "v": 1}]}, True),
        ({"pk": [{"t": "i64", "v": 2}]}, True),
        ({"pk": [{"t": "i64", "v": 3}]}, False),  # it does not matter to the question
        ({"where": "size = 0"}, False),
        ({"ops": ("delete",)}, False),
        ({"ops": ("insert", "delete")}, True),
        ({"columns": ("note",)}, True),
    ],
)
def test_a_filter_passes_if_any_change_that_matters_passes(filter_: dict[str, Any], passes: bool) -> None:
    fed, question = Fed(), Fake(holds=lambda row: row[1] == 1)
    fed.commit(insert(1, 1), insert(2, 1), insert(3, 0))
    found = everything(fed, view(fed, question, tables=("items",), **filter_))
    assert offsets(found) == ([2] if passes else [])


def test_an_image_outside_the_filter_is_withheld() -> None:
    fed = Fed()
    fed.commit(insert(1, 1), insert(2, 1))
    shown = view(fed, Fake(), tables=("items",), after=True, pk=[{"t": "i64", "v": 1}])
    ((offset, data),) = everything(fed, shown)
    assert offset == 2 and "after" not in json.loads(data)


def test_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relevant_changes, "MOST_KEYS", 3)
    fed = Fed()
    fed.commit(*(insert(id) for id in range(5)))
    ((_, data),) = everything(fed, view(fed, Fake()))
    body = json.loads(data)
    assert body["changed_keys"] == {"items": [[0], [1], [2]]} and body["changed_keys_cut"] is True


def test_a_change_of_the_schema_invalidates_and_ends_the_page_until_it_is_understood() -> None:
    fed, question = Fed(), Fake(holds=lambda row: row[1] == 1)
    fed.commit(insert(1, 1))
    fed.commit(Change(Op.SCHEMA_CHANGE, WIDER, ddl="ALTER TABLE items ADD COLUMN more TEXT"))
    fed.commit(Change(Op.INSERT, WIDER, None, (2, 1, "", "")))
    seen = view(fed, question)
    page = read_page(fed.log, seen, after=0, limit=100, most=1 << 20)
    assert [delivery.offset for delivery in page.deliveries] == [1, 2] and page.upto == 2 and seen.is_outdated
    assert json.loads(page.deliveries[1].data)["ddl"].startswith("ALTER")
    seen.understood(Fake(head=2))
    assert offsets(everything(fed, seen, after=2)) == [3]
    assert not seen.is_outdated


def test_a_quiet_question_moves_on_also_inside_a_huge_transaction() -> None:
    fed, question = Fed(part=10), Fake(holds=lambda row: row[0] == 99)
    fed.commit(*(insert(id) for id in range(100)))
    page = read_page(fed.log, view(fed, question), after=0, limit=10, most=1 << 20, scan=20)
    assert not page.deliveries and 20 <= page.upto < 100
    assert offsets(everything(fed, view(fed, question), after=page.upto)) == [100]


def test_past_the_horizon_is_told() -> None:
    fed = Fed(retention=2)
    for id in range(5):
        fed.commit(insert(id))
    with pytest.raises(OffsetExpired):
        read_page(fed.log, view(fed, Fake()), after=0, limit=10, most=1 << 20)


# --- live -----------------------------------------------------------------------------------------------------


class Taker:
    """Takes from a group, and reads the log when it has to."""

    def __init__(self, fed: Fed, hub: Hub, question: Fake, **given: Any) -> None:
        self.fed, self.hub = fed, hub
        self.view = hub.view(options(question, **given), question)
        self.group = hub.join(self.view, line)
        self.began = self.cursor = fed.log.latest
        self.seen = self._place()
        self.found: list[Told] = []

    def _place(self) -> int | None:
        return self.group.seek(self.cursor) if self.cursor <= self.hub.reached(self.view) else None

    def take(self) -> None:
        taken = None if self.seen is None else self.group.take(self.seen)
        if taken is None:
            self.seen = None
            page = read_page(self.fed.log, self.view, after=self.cursor, limit=3, most=1 << 20)
            self.found += [Told(str(offset), op.word, data) for offset, op, data in page.deliveries]
            self.cursor = page.upto
            self.seen = self._place()
        elif taken.piece:
            self.found += told(taken.piece)
            self.seen = taken.seen
            self.cursor = taken.offset

    async def finish(self) -> None:
        await settled(self.hub, self.fed)
        for _ in range(10_000):
            self.take()
            if self.seen == self.group.published:
                break
        self.hub.leave(self.group)


@pytest.mark.parametrize("seed", range(20))
def test_live_and_from_the_log_the_same_bytes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
            known[0].steady_from = known[1].steady_from = 1 << 60  # it takes a while to learn that nothing is known
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


def test_many_questions_cost_one_look_at_each_change() -> None:
    async def work() -> None:
        fed = Fed()
        known = [Fake(holds=lambda row, id=id: row[0] == id, key=id) for id in range(200)]
        asked = groups(*known)
        hub = Hub(fed.log, fed.source, run, asked)
        takers = [Taker(fed, hub, one) for one in known]
        fed.commit(*(insert(id) for id in range(50)))
        await settled(hub, fed)
        assert asked._routes.routed == 50  # type: ignore[attr-defined]
        for taker in takers:
            taker.take()
        assert [len(taker.found) for taker in takers] == [1] * 50 + [0] * 150
        await hub.close()

    in_loop(work)


def test_a_reader_never_stands_behind_what_a_transaction_in_progress_may_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub publishes a large transaction in steps; a cursor that moved with them would skip its invalidation."""
    monkeypatch.setattr(hub_module, "BATCH", 2)

    async def work() -> None:
        fed, question = Fed(part=2), Fake(holds=lambda row: row[0] == 0)
        hub = Hub(fed.log, fed.source, run, groups(question))
        taker = Taker(fed, hub, question)
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
    ("steady", "told"), [(None, [2, 4, 5]), (5, [2, 4, 5]), (4, [2, 4]), (3, [2, 4]), (2, [2]), (1, [2]), (0, [])]
)
def test_what_left_the_answer_as_it_was_is_not_told(steady: int | None, told: list[int]) -> None:
    """The transactions are (1, 2), (3, 4) and (5): the one in which `steady` lies is told, and those before it."""

    async def work() -> None:
        fed, question = Fed(), Fake()
        question.steady_from = steady
        hub = Hub(fed.log, fed.source, run, groups(question))
        taker = Taker(fed, hub, question)
        fed.commit(insert(1), insert(2))
        fed.commit(insert(3), insert(4))
        fed.commit(insert(5))
        await settled(hub, fed)
        taker.take()
        assert [int(one.id) for one in taker.found] == told
        assert hub.reached(taker.view) == 5
        replayed = everything(fed, taker.view)  # type: ignore[arg-type]
        assert offsets(replayed) == [2, 4, 5]
        await hub.close()

    in_loop(work)


def test_a_large_transaction_that_left_the_answer_as_it_was_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of its last part mattered: that is where it ends all the same."""
    monkeypatch.setattr(hub_module, "BATCH", 2)

    async def work() -> None:
        fed, question = Fed(part=2), Fake(holds=lambda row: row[0] < 3)
        question.steady_from = 0
        hub = Hub(fed.log, fed.source, run, groups(question))
        taker = Taker(fed, hub, question)
        fed.commit(*(insert(id) for id in range(20)))
        await settled(hub, fed)
        taker.take()
        assert not taker.found and hub.reached(taker.view) == 20
        await hub.close()

    in_loop(work)


def test_who_cannot_say_whether_the_answer_is_the_same_is_told() -> None:
    class Broken(Fake):
        is_guarded = True

        def steady(self, upto: int) -> int | None:
            raise OffsetExpired(0, 1, upto)

    async def work() -> None:
        fed, question = Fed(), Broken()
        hub = Hub(fed.log, fed.source, run, groups(question))
        taker = Taker(fed, hub, question)
        fed.commit(insert(1))
        await settled(hub, fed)
        taker.take()
        assert [one.id for one in taker.found] == ["1"]
        await hub.close()

    in_loop(work)


# --- confirmed ------------------------------------------------------------------------------------------------


def test_what_is_known_to_be_the_same_is_not_asked_again() -> None:
    fed, question = Fed(), Fake()
    for id in range(1, 5):
        fed.commit(insert(id))
    seen = confirmed(fed, question, (1, b"a"), (4, b"a"))
    assert seen.confirming is not None
    seen.confirming.prime(question)
    question.steady_from = 1
    assert offsets(everything(fed, seen, after=1)) == []
    assert len(question.answers) == 1, "nobody was asked"
    question.steady_from = None
    fed.commit(insert(5))
    question.answers = [Answered(5, b"a")]
    assert offsets(everything(fed, seen, after=1)) == [], "the answer before it is the one that was known"


def test_what_is_known_of_an_earlier_answer_is_not_taken_for_this_one() -> None:
    fed, question = Fed(), Fake()
    for id in range(1, 4):
        fed.commit(insert(id))
    seen = confirmed(fed, question, (1, b"a"), (3, b"a"))
    assert seen.confirming is not None
    seen.confirming.prime(question)
    question.steady_from = 2  # what came at 2 is told, and the answer may be another since
    assert offsets(everything(fed, seen, after=2)) == []
    question.steady_from = None
    fed.commit(insert(4))
    question.answers = [Answered(4, b"a")]
    assert offsets(everything(fed, seen, after=3)) == [4]


def confirmed(fed: Fed, question: Fake, *answers: tuple[int, bytes] | None) -> QueryView:
    question.answers = [None if one is None else Answered(*one) for one in answers]
    return QueryView(options(question, confirm=True), fed.source, question, confirming=Confirming())


def test_an_answer_that_is_the_same_keeps_it_quiet() -> None:
    fed, question = Fed(), Fake()
    fed.commit(insert(1))
    fed.commit(insert(2))
    fed.commit(insert(3))
    seen = confirmed(fed, question, (1, b"a"), (2, b"a"), (3, b"b"))
    assert offsets(everything(fed, seen)) == [1, 3], "the first is told: nothing was known before"
    assert offsets(everything(fed, seen)) == [1, 3], "what was found is remembered"


def test_two_changes_between_two_answers_are_told_though_the_answers_are_equal() -> None:
    """Somebody may have asked in between, and holds the answer that was other."""
    fed, question = Fed(), Fake()
    for id in range(3):
        fed.commit(insert(id))
    seen = confirmed(fed, question, (1, b"a"), (3, b"a"))
    assert offsets(everything(fed, seen)) == [1, 2, 3]


def test_what_cannot_be_compared_is_told() -> None:
    fed, question = Fed(), Fake()
    for id in range(3):
        fed.commit(insert(id))
    assert offsets(everything(fed, confirmed(fed, question, (1, b"a"), None, (3, b"a")))) == [1, 2, 3]


def test_another_understanding_forgets_what_was_known() -> None:
    fed, question = Fed(), Fake()
    fed.commit(insert(1))
    seen = confirmed(fed, question, (1, b"a"))
    everything(fed, seen)
    other = Fake(key="other")
    other.answers = [Answered(2, b"a")]
    seen.understood(other)
    fed.commit(insert(2))
    assert offsets(everything(fed, seen, after=1)) == [2]
