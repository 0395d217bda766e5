"""Filters against a model of the specification, and feeds folded back into the rows of their table."""

from __future__ import annotations

import ast
import math
import zlib
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.feeds.filter_source import (
    BARE,
    NAMED,
    NUMBERED,
    PAIRED,
    SOURCE,
    TABLES,
    Comparison,
    FilterSource,
    at,
    filters,
    histories,
    keys,
    place_of,
    row_filters,
    rows,
)

from headwater.errors import Forbidden, InvalidRequest, SourceError
from headwater.feeds.filters.filter import Filter, NewerThanSnapshot
from headwater.feeds.filters.row_filter import same, share
from headwater.feeds.groups.log_reader import View
from headwater.feeds.options import Options, Shard
from headwater.model.change import Change, Op
from headwater.model.keys.key import encode_key
from headwater.model.literal import Embedding, from_lit
from headwater.model.table import Column, Row, Table

INSERT, UPDATE, DELETE = Op.INSERT, Op.UPDATE, Op.DELETE


def filter_of(table: Table = NUMBERED, **parts: Any) -> Filter:
    """Return the filter of a subscription to `table` with these options."""
    return Filter(Options(db="main", tables=(table.name,), **parts), SOURCE)


def change(before: Row | None, after: Row | None, table: Table = NUMBERED) -> Change:
    return Change(INSERT if before is None else DELETE if after is None else UPDATE, table, before, after)


# --- the model -------------------------------------------------------------------------------------------


def rank(value: Any, collation: str) -> Any:
    """Return a key that sorts values as SQLite does: null, numbers, text, blobs."""
    if value is None:
        return (0,)
    if isinstance(value, str):
        return (2, value.lower() if collation == "NOCASE" else value)
    return (3, value) if isinstance(value, bytes) else (1, value)


def ranks(table: Table, names: Any, values: Any) -> list[Any]:
    return [rank(value, table.columns[table.index[name]].collation) for name, value in zip(names, values, strict=True)]


def is_in_span(table: Table, span: dict[str, Any], row: Row) -> bool:
    def compared(lits: list[Any]) -> tuple[list[Any], list[Any]]:
        names = table.key[: len(lits)]
        return ranks(table, names, map(from_lit, lits)), ranks(table, names, table.key_of(row)[: len(lits)])

    if "prefix" in span:
        wanted, held = compared(span["prefix"])
        return wanted == held
    low, from_low = compared(span.get("lower_bound", []))
    high, to_high = compared(span.get("upper_bound", []))
    return low <= from_low and to_high <= high


def is_true(table: Table, where: str, row: Row) -> bool:
    name, operator, text = where.split(" ", 2)
    held, given = row[table.index[name]], ast.literal_eval(text)
    if held is None:
        return False
    (left,) = ranks(table, [name], [held])
    right = [ranks(table, [name], [one])[0] for one in (given if operator == "IN" else [given])]
    return left > right[0] if operator == ">" else left in right


def is_inside(options: Options, table: Table, row: Row) -> bool:
    if options.pk is not None and not is_in_span(table, {"prefix": options.pk}, row):
        return False
    bounds = {name: [lit] for name, lit in (options.pk_range or {}).items()}
    if not is_in_span(table, bounds, row):
        return False
    if options.spans is not None and not any(is_in_span(table, span, row) for span in options.spans):
        return False
    if options.shard is not None:
        collations = [table.columns[place].collation for place in table.key_places]
        if zlib.crc32(encode_key(table.key_of(row), collations)) % options.shard.of != options.shard.index:
            return False
    return options.where is None or is_true(table, options.where, row)


def expected(options: Options, change: Change, is_news: Any = lambda row: True) -> Op | None:
    """Return the op a change is delivered as, or None, by WIRE §3, §11.12, §11.16 and seed-systems §1.8."""
    table = change.table
    if options.tables and table.name not in options.tables:
        return None
    if change.op in (Op.SCHEMA_CHANGE, Op.TRUNCATE):
        return change.op if not options.ops or change.op.word in options.ops else None
    was = change.before is not None and is_inside(options, table, change.before) and is_news(change.before)
    now = change.after is not None and is_inside(options, table, change.after) and is_news(change.after)
    if was and now:
        op = UPDATE
    elif now:
        op = INSERT
    elif was:
        op = DELETE
    else:
        return None
    if options.ops and op.word not in options.ops:
        return None
    return op if not options.columns or columns_pass(options, change, op) else None


def columns_pass(options: Options, change: Change, op: Op) -> bool:
    selected = [name for name in options.columns if name in change.table.index]
    if op is not UPDATE:
        return bool(selected)
    assert change.before is not None and change.after is not None
    places = [change.table.index[name] for name in (*selected, *change.table.key)]
    return any(repr(change.before[place]) != repr(change.after[place]) for place in places)


@pytest.mark.slow
@given(st.data())
def test_filter_decides_as_specified(data: st.DataObject) -> None:
    table, other = data.draw(st.sampled_from(TABLES)), data.draw(st.sampled_from(TABLES))
    options = data.draw(filters(table))
    changes = [*data.draw(histories(table))[0], *data.draw(histories(other, 3))[0]]
    changes += [Change(op, shape) for op in (Op.SCHEMA_CHANGE, Op.TRUNCATE) for shape in (table, other)]
    wanted = [expected(options, one) for one in changes]
    assert Filter(options, SOURCE).decide(changes) == wanted


@pytest.mark.slow
@given(st.data())
def test_filter_decides_as_specified_after_a_snapshot(data: st.DataObject) -> None:
    table = data.draw(st.sampled_from(TABLES))
    options, (changes, _) = data.draw(filters(table)), data.draw(histories(table))
    limits = data.draw(st.lists(st.integers(99, 112), min_size=3, max_size=3))

    def newer(offset: int, shape: Table, row: Row) -> bool:
        assert shape is table
        return offset > limits[share(place_of(shape, row), 3)]

    wanted = [
        expected(options, one, lambda row, offset=offset: newer(offset, table, row))
        for offset, one in enumerate(changes, 100)
    ]
    assert Filter(options, SOURCE).decide(changes, first=100, newer=newer) == wanted


# --- folding ---------------------------------------------------------------------------------------------


def fold(held: dict[bytes, Row], changes: list[Change], ops: list[Op | None]) -> dict[bytes, Row]:
    """Apply the delivered changes, as a reader does."""
    for one, op in zip(changes, ops, strict=True):
        if op in (UPDATE, DELETE):
            assert one.before is not None
            gone = held.pop(place_of(one.table, one.before))
            assert repr(gone) == repr(one.before)
        if op in (UPDATE, INSERT):
            assert one.after is not None
            assert place_of(one.table, one.after) not in held
            held[place_of(one.table, one.after)] = one.after
    return held


def under(options: Options, table: Table, held: dict[bytes, Row]) -> dict[bytes, Row]:
    return {place: row for place, row in held.items() if is_inside(options, table, row)}


def written(held: dict[bytes, Row]) -> dict[bytes, str]:
    return {place: repr(row) for place, row in held.items()}  # 1 == 1.0, but it is not what the table holds


@pytest.mark.slow
@given(st.data())
def test_folded_feed_equals_the_filtered_table(data: st.DataObject) -> None:
    table = data.draw(st.sampled_from(TABLES))
    options = Options(db="main", tables=(table.name,), **data.draw(row_filters(table)))
    changes, held = data.draw(histories(table, 20))
    found = fold({}, changes, Filter(options, SOURCE).decide(changes))
    assert written(found) == written(under(options, table, held))


@pytest.mark.slow
@given(st.data())
def test_folded_feed_of_some_columns_equals_those_columns(data: st.DataObject) -> None:
    table = data.draw(st.sampled_from(TABLES))
    columns = tuple(data.draw(st.lists(st.sampled_from(table.names), min_size=1, unique=True)))
    options = Options(db="main", tables=(table.name,), columns=columns, **data.draw(row_filters(table)))
    changes, held = data.draw(histories(table, 20))
    kept = [table.index[name] for name in (*columns, *table.key)]

    found: dict[bytes, list[Any]] = {}
    for one, op in zip(changes, Filter(options, SOURCE).decide(changes), strict=True):
        if op in (UPDATE, DELETE):
            assert one.before is not None
            del found[place_of(table, one.before)]
        if op in (UPDATE, INSERT):
            assert one.after is not None
            found[place_of(table, one.after)] = [one.after[place] for place in kept]
    wanted = {place: [row[k] for k in kept] for place, row in under(options, table, held).items()}
    assert repr(sorted(found.items())) == repr(sorted(wanted.items()))


@pytest.mark.slow
@given(st.data())
def test_folded_snapshot_chunks_and_changes_equal_the_table(data: st.DataObject) -> None:
    table = data.draw(st.sampled_from(TABLES))
    options = Options(db="main", tables=(table.name,), **data.draw(row_filters(table)))
    changes, held = data.draw(histories(table, 20))
    first, second = sorted(data.draw(st.tuples(keys(table), keys(table))), key=SOURCE.order(table, table.key))
    edges = [SOURCE.order(table, table.key)(key) for key in (first, second)]
    read_at = sorted(data.draw(st.tuples(*[st.integers(0, len(changes))] * 3)))

    def offset_of(place: bytes) -> int:
        return read_at[sum(edge <= place for edge in edges)]

    snapshot: dict[bytes, Row] = {}
    for offset in set(read_at):
        then = fold({}, changes[:offset], [one.op for one in changes[:offset]])
        snapshot |= {place: row for place, row in then.items() if offset_of(place) == offset}
    rows_first = {place_of(table, row): row for row in Filter(options, SOURCE).rows(table, list(snapshot.values()))}
    newer: NewerThanSnapshot = lambda offset, shape, row: offset > offset_of(place_of(shape, row))  # noqa: E731
    found = fold(rows_first, changes, Filter(options, SOURCE).decide(changes, first=1, newer=newer))
    assert written(found) == written(under(options, table, held))


@pytest.mark.slow
@given(st.data())
def test_snapshot_rows_are_those_that_pass_as_inserts(data: st.DataObject) -> None:
    table = data.draw(st.sampled_from(TABLES))
    options, held = data.draw(filters(table)), data.draw(st.lists(rows(table)))
    wanted = [row for row in held if expected(options, change(None, row, table)) is INSERT]
    assert Filter(options, SOURCE).rows(table, held) == wanted


# --- single points ---------------------------------------------------------------------------------------


def test_range_delivers_four_cases_by_both_images() -> None:
    in_range = filter_of(pk_range={"lower_bound": {"t": "i64", "v": 1}, "upper_bound": {"t": "i64", "v": 3}})
    moves = [(1, 3), (0, 1), (3, 4), (0, 4)]
    changes = [change(("x", before, 1), ("x", after, 1)) for before, after in moves]
    assert in_range.decide(changes) == [UPDATE, INSERT, DELETE, None]


def test_ops_filter_compares_the_delivered_op() -> None:
    only_inserts = filter_of(pk=at((1,)), ops=("insert",))
    changes = [change(("x", 2, 1), ("x", 1, 1)), change(("x", 1, 1), ("y", 1, 1)), change(("x", 1, 1), None)]
    assert only_inserts.decide(changes) == [INSERT, None, None]
    assert only_inserts.raw_ops() == {INSERT, UPDATE}
    assert filter_of(ops=("insert",)).raw_ops() == {INSERT}
    assert filter_of(pk=at((1,)), ops=("update",)).raw_ops() == {UPDATE}


def test_key_filter_compares_as_the_database_does() -> None:
    assert filter_of(pk=at((1,))).decide([change(None, ("x", 1.0, 1))]) == [INSERT]
    assert filter_of(NAMED, pk=at(("Ada",))).decide([change(None, ("aDA", 1, 1), NAMED)]) == [INSERT]
    assert filter_of(PAIRED, spans=[{"prefix": at(("A",))}]).decide([change(None, (1, 5, "", "a"), PAIRED)]) == [INSERT]


def test_spans_are_sorted_and_merged_where_they_touch() -> None:
    def span(**bounds: int) -> dict[str, Any]:
        return {f"{name}_bound": at((value,)) for name, value in bounds.items()}

    pairs = [(5, 9), (1, 2), (7, 12), (88, 92)]
    given = [span(lower=90), *(span(lower=low, upper=high) for low, high in pairs), span(lower=95)]
    filter_ = filter_of(spans=given)
    spans = filter_.interest(NUMBERED).spans
    assert spans is not None and len(spans) == 3 and list(spans) == sorted(spans, key=lambda one: one.start)
    inside = [number for number in range(100) if filter_.decide([change(None, ("", number, 0))]) == [INSERT]]
    assert inside == [1, 2, *range(5, 13), *range(88, 100)]
    nothing = filter_of(spans=given, pk_range={"lower_bound": at((3,))[0], "upper_bound": at((4,))[0]})
    assert nothing.decide([change(None, ("", number, 0)) for number in range(20)]) == [None] * 20


def test_update_passes_if_a_selected_column_or_the_key_changed() -> None:
    sizes = filter_of(columns=("size",))
    changes = [
        change(("x", 1, 1), ("y", 1, 1)),
        change(("x", 1, 1), ("x", 1, 2)),
        change(("x", 1, 1), ("x", 1, 1.0)),
        change(("x", 1, 1), ("x", 2, 1)),
        change(("x", 1, math.nan), ("y", 1, float("nan"))),
        change(None, ("x", 1, None)),
        change(("x", 1, None), None),
    ]
    assert sizes.decide(changes) == [None, UPDATE, UPDATE, UPDATE, None, INSERT, DELETE]


def test_table_without_the_selected_columns_delivers_nothing() -> None:
    absent = Filter(Options(db="main", columns=("nowhere",)), SOURCE)
    assert absent.decide([change(None, ("x", 1, 1)), change(("x", 1, 1), ("y", 1, 2))]) == [None, None]
    assert absent.rows(NUMBERED, [("x", 1, 1)]) == []


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (1, True, False),
        (0.0, -0.0, False),
        (math.nan, float("nan"), True),
        (Decimal("1.0"), Decimal("1.00"), False),
        (Decimal("NaN"), Decimal("NaN"), True),
        (Embedding((0.0,)), Embedding((-0.0,)), False),
        (Embedding((math.nan,)), Embedding((float("nan"),)), True),
        ("a", "A", False),
        (None, None, True),
    ],
)
def test_values_are_the_same_only_with_identical_type_and_form(one: Any, other: Any, alike: bool) -> None:
    assert same(one, other) is alike


@pytest.mark.parametrize("parts", [{}, {"columns": ("size",)}, {"where": "size = 1"}, {"pk": at((1,))}])
def test_schema_changes_and_truncates_pass_unless_ops_exclude_them(parts: dict[str, Any]) -> None:
    both = [Change(Op.SCHEMA_CHANGE, NUMBERED, ddl="ALTER …"), Change(Op.TRUNCATE, NUMBERED)]
    assert filter_of(**parts).decide(both) == [Op.SCHEMA_CHANGE, Op.TRUNCATE]
    assert filter_of(**parts, ops=("insert", "schema_change")).decide(both) == [Op.SCHEMA_CHANGE, None]
    assert filter_of(**parts, ops=("update",)).decide(both) == [None, None]
    assert filter_of(NAMED).decide(both) == [None, None]


def test_schema_change_passes_the_filter_whose_column_it_drops() -> None:
    shorter = Table("numbered", (Column("id"),), ("id",), version=2)
    by_size = filter_of(where="size = 1")
    assert by_size.decide([Change(Op.SCHEMA_CHANGE, shorter)]) == [Op.SCHEMA_CHANGE]
    with pytest.raises(InvalidRequest, match="does not fit table 'numbered' at version 2"):
        by_size.decide([change(None, (1,), shorter)])


@given(st.sampled_from(TABLES).flatmap(lambda table: st.tuples(st.just(table), rows(table))), st.integers(1, 9))
def test_every_row_is_in_exactly_one_shard(of_table: tuple[Table, Row], of: int) -> None:
    table, row = of_table
    shards = [filter_of(table, shard=Shard(index, of)) for index in range(of)]
    assert [op for shard in shards for op in shard.decide([change(None, row, table)])].count(INSERT) == 1


def test_equal_keys_are_in_the_same_shard() -> None:
    for index in range(7):
        words, numbers = filter_of(NAMED, shard=Shard(index, 7)), filter_of(shard=Shard(index, 7))
        a, b = words.decide([change(None, ("ADA", 1, 1), NAMED), change(None, ("ada", 2, 2), NAMED)])
        c, d = numbers.decide([change(None, ("x", 5, 1)), change(None, ("y", 5.0, 2))])
        assert a is b and c is d


def test_shards_are_of_similar_size() -> None:
    held = [("x", key, 1) for key in range(1000)]
    assert all(150 < len(filter_of(shard=Shard(index, 5)).rows(NUMBERED, held)) < 250 for index in range(5))


@pytest.mark.parametrize(
    ("table", "parts", "why"),
    [
        (NUMBERED, {"pk": at((1, 2))}, "pk has 2 values, the key of 'numbered' has 1"),
        (NUMBERED, {"pk": at((None,))}, "nothing compares with null"),
        (NUMBERED, {"pk_range": {}}, "needs a lower_bound or an upper_bound"),
        (NUMBERED, {"pk_range": {"lower_bound": at((2,))[0], "upper_bound": at((1,))[0]}}, "above the upper"),
        (NUMBERED, {"spans": [{"prefix": at((1, 2))}]}, "has 1 values, 2 given"),
        (PAIRED, {"pk_range": {"lower_bound": at((2,))[0]}}, "a key of one column"),
        (BARE, {"pk": at((1,))}, "no primary key"),
        (NUMBERED, {"where": "nowhere = 1"}, "cannot be read"),
    ],
)
def test_filter_that_is_invalid_for_its_table_is_refused_with_the_reason(
    table: Table, parts: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        filter_of(table, **parts).interest(table)
    assert caught.value.hint


class Away(FilterSource):
    """A source whose database is unavailable."""

    def condition(self, table: Table, where: str) -> Comparison:
        raise SourceError("cannot connect")


def test_unavailable_database_is_not_reported_as_a_misfit() -> None:
    found = Filter(Options(db="main", tables=(NUMBERED.name,), where="size = 1"), Away("main", NUMBERED))
    with pytest.raises(SourceError, match="cannot connect"):
        found.interest(NUMBERED)


class Calling(FilterSource):
    """A source where conditions on the first version of a table call a function of users."""

    def condition(self, table: Table, where: str) -> Comparison:
        found = super().condition(table, where)
        if table.version == 1:
            found.calls = ("peek",)
        return found


def test_filter_of_restricted_readers_calls_no_function_of_users_on_any_table_version() -> None:
    then, now = (msgspec.structs.replace(NUMBERED, version=version) for version in (1, 2))
    options = Options(db="main", tables=(NUMBERED.name,), where="size = 1")
    restricted = View(options, Calling("main", now), is_restricted=True).filter
    everyone = View(options, Calling("main", now)).filter
    row = ("x", 1, 1)
    assert restricted.decide([change(None, row, now)]) == everyone.decide([change(None, row, then)]) == [INSERT]
    with pytest.raises(Forbidden, match="needs a credential for the whole database"):
        restricted.decide([change(None, row, then)])
    with pytest.raises(Forbidden, match="needs a credential for the whole database"):
        restricted.rows(then, [row])


def test_key_with_an_unknown_collation_is_refused_only_by_shard_filters() -> None:
    odd = Table("odd", (Column("id", collation="GERMAN"), Column("size")), ("id",))
    assert filter_of(odd, where="size = 1").decide([change(None, ("ä", 1), odd)]) == [INSERT]
    assert filter_of(odd, columns=("size",)).rows(odd, [("ä", 1)]) == [("ä", 1)]
    with pytest.raises(InvalidRequest, match="no byte order"):
        filter_of(odd, shard=Shard(0, 2)).interest(odd)
