"""The router finds every change that passes a filter, and few others, at a cost independent of the filter count."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.feeds.filter_source import NAMED, NUMBERED, PAIRED, SOURCE, TABLES, FilterSource, at, filters, histories
from tests.sources.sqlite_source import Rig

from headwater.errors import HeadwaterError, InvalidRequest
from headwater.feeds.filters.filter import Filter
from headwater.feeds.filters.filter_router import Router
from headwater.feeds.options import Options, Shard
from headwater.model.change import Change, Op
from headwater.model.keys.key import Span
from headwater.model.keys.span_index import SpanIndex
from headwater.model.literal import UNAVAILABLE, to_lit
from headwater.model.table import Column, Row, Table


def on(*tables: Table, **parts: Any) -> Filter:
    return Filter(Options(db="main", tables=tuple(table.name for table in tables), **parts), SOURCE)


def within(low: int | None = None, high: int | None = None) -> dict[str, Any]:
    bounds = {"lower_bound": low, "upper_bound": high}
    return {name: to_lit(value) for name, value in bounds.items() if value is not None}


def insert(row: Row, table: Table = NUMBERED) -> Change:
    return Change(Op.INSERT, table, None, row)


def update(before: Row, after: Row, table: Table = NUMBERED) -> Change:
    return Change(Op.UPDATE, table, before, after)


def routed(filters: dict[Any, Filter], *changes: Change) -> dict[Any, list[int]]:
    router: Router[Any] = Router()
    for token, filter in filters.items():
        router.add(token, filter)
    return router.route(changes)


# --- completeness ----------------------------------------------------------------------------------------


def missed(held: dict[int, Filter], found: dict[int, list[int]], changes: list[Change]) -> list[Any]:
    """Return the changes that pass a filter and that the router did not find."""
    return [
        (token, held[token].options, changes[place])
        for token in held
        for place, op in enumerate(held[token].decide(changes))
        if op is not None and place not in found.get(token, [])
    ]


@st.composite
def mixed_changes(draw: st.DrawFn) -> list[Change]:
    drawn = draw(st.lists(st.sampled_from(TABLES).flatmap(lambda table: histories(table, 5)), max_size=3))
    plain = draw(st.lists(st.builds(Change, st.sampled_from([Op.SCHEMA_CHANGE, Op.TRUNCATE]), st.sampled_from(TABLES))))
    return [*(change for changes, _ in drawn for change in changes), *plain]


@pytest.mark.slow
@given(st.data())
def test_no_change_is_missed_while_filters_are_added_and_removed(data: st.DataObject) -> None:
    router: Router[int] = Router()
    held: dict[int, Filter] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        for token in data.draw(st.lists(st.integers(0, 9), max_size=6)):
            if data.draw(st.integers(0, 3)) == 0:
                router.remove(token)
                held.pop(token, None)
            else:
                held[token] = Filter(data.draw(st.sampled_from(TABLES).flatmap(filters)), SOURCE)
                router.add(token, held[token])
        changes = data.draw(mixed_changes())
        found = router.route(changes)
        assert missed(held, found, changes) == []
        assert found.keys() <= held.keys()
        assert all(places == sorted(set(places)) for places in found.values())
        assert len(router._filters) == len(held)
    for token in range(10):
        router.remove(token)
    assert len(router._filters) == 0
    assert router.route(data.draw(mixed_changes())) == {}


def test_no_change_of_a_real_database_is_missed(rig: Callable[..., Rig]) -> None:
    live = rig("CREATE TABLE people (id INTEGER PRIMARY KEY, email TEXT COLLATE NOCASE, age REAL, note)")
    live.foreign.script(
        "INSERT INTO people VALUES (1, 'Ada', 1, 1), (2, 'bob', 2.5, '1'), (3, NULL, NULL, 1.0), (4, '5', 4, x'31')",
        "UPDATE people SET email = 'ada' WHERE id = 2",
        "UPDATE people SET id = -id, age = age + 1",
        "UPDATE people SET email = upper(email), note = note + 0",
        "DELETE FROM people WHERE id < -2",
    )
    changes = live.pull()
    parts: list[dict[str, Any]] = [{"where": where} for where in WHERE]
    parts += [{"pk": [to_lit(key)]} for key in (1, "2", 3.0, -3)]
    parts += [{"pk_range": within(-2, 2)}, {"shard": Shard(1, 2)}, {"ops": ("insert",), "where": "age = 2"}]
    held = {
        token: Filter(Options(db="main", tables=("people",), **one), live.source) for token, one in enumerate(parts)
    }
    found = routed(held, *changes)
    assert missed(held, found, changes) == []
    delivered = [token for token in held if any(held[token].decide(changes))]
    assert len(delivered) == len(held)  # each of them could have been missed


WHERE = (
    "email = 'ADA'",
    "email = 'ada' AND age > 1",
    "email IN ('bob', 'nobody')",
    "email = 5",
    "email = 'ada' COLLATE BINARY",
    "email LIKE 'a%'",
    "age = 2",
    "age = '2'",
    "age IS NULL",
    "id = 1",
    "id = '1'",
    "id = 1 OR email = 'bob'",
    "note = 1",
    "note = '1'",
    "note = x'31'",
    "NOT note = 1",
)

SPANS = st.builds(lambda a, b: Span(min(a, b), max(a, b) + b"\0"), *[st.binary(max_size=2)] * 2)
SPANS_OF_A_TOKEN = st.lists(st.one_of(SPANS, st.builds(Span, st.binary(max_size=2))), max_size=3).map(tuple)


@pytest.mark.slow
@given(st.data())
def test_span_index_returns_exactly_the_spans_with_the_key(data: st.DataObject) -> None:
    index: SpanIndex[int] = SpanIndex()
    held: dict[int, tuple[Span, ...]] = {}
    for step in range(data.draw(st.integers(1, 30))):
        if held and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(held)))
            index.remove(gone)
            del held[gone]
        else:
            held[step] = data.draw(SPANS_OF_A_TOKEN)
            index.add(step, held[step])
        key = data.draw(st.binary(max_size=2))
        found = {token for tokens in index.at(key) for token in tokens}
        assert found == {token for token, spans in held.items() if any(span.contains(key) for span in spans)}


# --- selectivity -----------------------------------------------------------------------------------------


def test_key_filter_matches_both_images() -> None:
    by_key = {key: on(NUMBERED, pk=at((key,))) for key in range(5)}
    changes = (update(("x", 1, 0), ("x", 2, 0)), update(("x", 3.0, 0), ("y", 3, 0)), insert(("x", 9, 0)))
    assert routed(by_key, *changes) == {1: [0], 2: [0], 3: [1]}


def test_equality_filter_matches_both_images() -> None:
    by_note = {note: on(PAIRED, where=f"note = {note!r}") for note in ("ada", "bob", "cyd")}
    by_note["either"] = on(PAIRED, where="note IN ('ada', 'bob')")
    changes = (update((1, 1, "ADA", "k"), (1, 1, "cyd", "k"), PAIRED), insert((1, 2, None, "k"), PAIRED))
    assert routed(by_note, *changes) == {"ada": [0], "cyd": [0], "either": [0]}


def test_values_equal_in_python_but_not_in_the_database_are_distinct() -> None:
    held = {1: on(NUMBERED, where="size = 1")}
    assert held[1].decide([update(("x", 1, 1), ("x", 1, Decimal(1)))]) == [Op.DELETE]
    assert routed(held, update(("x", 1, 1), ("x", 1, Decimal(1)))) == {1: [0]}


def test_range_filter_matches_both_images() -> None:
    tens = {low: on(NUMBERED, pk_range=within(low, low + 9)) for low in range(0, 100, 10)}
    tens[-1] = on(NUMBERED, pk_range=within(high=15))
    changes = (update(("x", 12, 0), ("x", 57, 0)), insert(("x", 100, 0)))
    assert routed(tens, *changes) == {10: [0], 50: [0], -1: [0]}


def test_shard_receives_its_share_of_changes() -> None:
    shards = {(index, of): on(NUMBERED, shard=Shard(index, of)) for of in (3, 5) for index in range(of)}
    found = routed(shards, *(insert(("x", key, 0)) for key in range(100)))
    for of in (3, 5):
        assert sorted(place for index in range(of) for place in found[index, of]) == list(range(100))


def test_shard_filter_on_a_table_without_key_is_always_evaluated() -> None:
    keyless = Table("keyless", (Column("size"),))
    assert routed({index: on(keyless, shard=Shard(index, 2)) for index in range(2)}, insert((1,), keyless)) == {
        0: [0],
        1: [0],
    }


def test_ops_that_cannot_pass_are_not_routed() -> None:
    by_ops = {
        "insert": on(NUMBERED, ops=("insert",)),
        "delete": on(NUMBERED, ops=("delete",)),
        "moved in": on(NUMBERED, ops=("insert",), pk=at((1,))),
        "schema": on(NUMBERED, ops=("schema_change",)),
        "all": on(NUMBERED),
    }
    found = routed(by_ops, insert(("x", 1, 0)), update(("x", 1, 0), ("y", 1, 0)))
    assert found == {"insert": [0], "moved in": [0, 1], "all": [0, 1]}


def test_change_is_routed_to_filters_on_its_table_and_on_all_tables() -> None:
    by_table = {"both": on(NUMBERED, NAMED), "named": on(NAMED), "all": on(), "all inserts": on(ops=("insert",))}
    found = routed(by_table, insert(("x", 1, 0)), insert(("x", 1, 0), NAMED), insert((1, 1, 1, 1), PAIRED))
    assert found == {"both": [0, 1], "named": [1], "all": [0, 1, 2], "all inserts": [0, 1, 2]}


def test_filter_is_indexed_by_its_most_selective_condition() -> None:
    parts: dict[str, Any] = {
        "pk": at((1,)),
        "where": "size = 5",
        "spans": [{"prefix": at((2,))}, {"prefix": at((1,))}],
        "shard": Shard(0, 1),
    }
    every = ("pk", "where", "spans", "shard")
    nested = {every[low]: on(NUMBERED, **{name: parts[name] for name in every[low:]}) for low in range(4)}
    changes = (insert(("x", 1, 0)), insert(("x", 9, 5)), insert(("x", 2, 0)))
    assert routed(nested, *changes) == {"pk": [0], "where": [1], "spans": [0, 2], "shard": [0, 1, 2]}


def test_change_without_images_is_routed_to_every_filter_on_the_table() -> None:
    held = {"key": on(NUMBERED, pk=at((1,))), "other": on(NAMED), "all": on(), "ops": on(ops=("insert",))}
    found = routed(held, Change(Op.SCHEMA_CHANGE, NUMBERED, ddl="ALTER …"), Change(Op.TRUNCATE, NUMBERED))
    assert found == {"key": [0, 1], "all": [0, 1], "ops": [0, 1]}


# --- table versions --------------------------------------------------------------------------------------


def test_router_indexes_a_filter_again_for_a_new_table_version() -> None:
    router: Router[str] = Router()
    router.add("key", on(NUMBERED, pk=at((1,))))
    router.add("size", on(NUMBERED, where="size = 1"))
    other = Table("numbered", (Column("size"), Column("more"), Column("id")), ("id",), version=2)
    changes = [insert(("x", 1, 0)), insert((0, "x", 1), other), insert((1, "x", 0), other), insert(("x", 0, 1))]
    assert router.route(changes) == {"key": [0, 1], "size": [2, 3]}


def test_equal_table_object_uses_the_same_index() -> None:
    made: list[Table] = []

    class Counting(FilterSource):
        def order(self, table: Table, columns: Any) -> Any:
            made.append(table)
            return super().order(table, columns)

    router: Router[int] = Router()
    router.add(1, Filter(Options(db="main", tables=("numbered",), pk=at((1,))), Counting("main", NUMBERED)))
    router.route([insert(("x", 1, 0))])
    before = len(made)
    again = msgspec.json.decode(msgspec.json.encode(NUMBERED), type=Table)
    assert router.route([insert(("x", 1, 0), again), insert(("x", 1, 0))]) == {1: [0, 1]}
    assert len(made) == before


def test_row_without_the_filter_column_is_routed_to_its_filter_and_to_matching_others() -> None:
    shorter = Table("numbered", (Column("id"),), ("id",), version=2)
    held = {"size": on(NUMBERED, where="size = 1", ops=("insert",)), "key": on(NUMBERED, pk=at((1,)))}
    gone = Change(Op.DELETE, shorter, (5,), None)
    found = routed(held, insert(("x", 5, 2)), gone, insert((1,), shorter))
    assert found == {"size": [1, 2], "key": [2]}
    with pytest.raises(InvalidRequest):
        held["size"].decide([gone])


def test_value_without_byte_encoding_is_routed_to_every_filter() -> None:
    held = {size: on(NUMBERED, where=f"size = {size}") for size in range(3)}
    with pytest.raises(HeadwaterError):
        held[0].decide([insert(("x", 1, UNAVAILABLE))])
    assert routed(held, insert(("x", 1, 1)), insert(("x", 1, UNAVAILABLE))) == {0: [1], 1: [0, 1], 2: [1]}


def test_token_added_again_has_only_its_new_filter() -> None:
    router: Router[str] = Router()
    changes = [insert(("x", 1, 0)), insert(("x", 2, 0)), insert(("x", 3, 0), NAMED)]
    for filter, places in ((on(NUMBERED, pk=at((1,))), [0]), (on(NUMBERED, pk=at((2,))), [1]), (on(NAMED), [2])):
        router.add("one", filter)
        assert router.route(changes) == {"one": places}
        assert len(router._filters) == 1


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"pk": at((1,))},
        {"where": "size = 0"},
        {"pk_range": within(0, 5)},
        {"shard": Shard(0, 1)},
        {"ops": ("insert",)},
    ],
    ids=lambda parts: "".join(parts) or "all",
)
def test_removed_token_receives_nothing_and_others_stay(parts: dict[str, Any]) -> None:
    router: Router[int] = Router()
    for token in range(5):
        router.add(token, on(NUMBERED, **parts))
    changes = [insert(("x", 1, 0)), Change(Op.TRUNCATE, NUMBERED)]
    for gone in range(5):
        assert router.route(changes) == {token: [0, 1] for token in range(gone, 5)}
        router.remove(gone)
    assert router.route(changes) == {}


def test_filter_that_nothing_passes_is_added_and_removed() -> None:
    router: Router[int] = Router()
    for token, parts in enumerate(({"where": "size IN ()"}, {"where": "size IN ()"}, {"spans": []})):
        router.add(token, on(NUMBERED, **parts))
    assert router.route([insert(("x", 1, 1))]) == {}
    for token in range(3):
        router.remove(token)
    assert router.route([Change(Op.TRUNCATE, NUMBERED)]) == {}


# --- cost ------------------------------------------------------------------------------------------------


class Watched:
    """A token that counts how often tokens are hashed."""

    looked_at: Counter[str] = Counter()

    def __hash__(self) -> int:
        self.looked_at["hash"] += 1
        return id(self) >> 4


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(lambda n: {"pk": at((n,))}, id="pk"),
        pytest.param(lambda n: {"where": f"note = 'n{n}'"}, id="equality"),
        pytest.param(lambda n: {"pk_range": within(10 * n, 10 * n + 9)}, id="range"),
        pytest.param(lambda n: {"shard": Shard(n, 3000)}, id="shard"),
        pytest.param(lambda n: {"ops": ("delete",)}, id="ops"),
        pytest.param(lambda n: {"spans": [{"prefix": at((n,))}, {"prefix": at((-n,))}]}, id="spans"),
    ],
)
def test_change_evaluates_few_of_many_filters(parts: Any) -> None:
    router: Router[Watched] = Router()
    held = [Watched() for _ in range(3000)]
    for n, token in enumerate(held):
        router.add(token, on(NUMBERED, **parts(n)))
    changes = [update(("n3", key, 0), ("n7", key, 0)) for key in range(50)]
    router.route(changes)  # builds the indexes
    Watched.looked_at.clear()
    router.route(changes)
    assert Watched.looked_at["hash"] <= 3 * len(changes)


def test_thousands_of_overlapping_ranges_use_little_memory() -> None:
    tracemalloc.start()
    index: SpanIndex[int] = SpanIndex()
    for n in range(2000):
        index.add(n, (Span(n.to_bytes(2), (n + 10000).to_bytes(2)),))
    assert sum(len(list(tokens)) for tokens in index.at((1999).to_bytes(2))) == 2000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2000 * 4096
