"""Predicates on rows: every evaluator returns SQLite's own result, and what cannot be exact is refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sources.sqlite.query.random_predicates import RandomTable, is_broken
from tests.sources.sqlite_source import Rig
from tests.suite.deadlines import PATIENCE
from tests.suite.examples import examples

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.keys.key import encode_key
from headwater.model.literal import Date, Json
from headwater.model.table import Column, Row, Table
from headwater.sources.sqlite.key_order import order
from headwater.sources.sqlite.query.predicate_engine import Engine
from headwater.sources.sqlite.query.where import Predicates, SqliteCondition

ORDERS = Table(
    "orders",
    (
        Column("id", "i64", "INTEGER", auto=True),
        Column("total", "f64", "REAL"),
        Column("state", "str", "TEXT", collation="NOCASE"),
        Column("code", "str", "VARCHAR(9)"),
        Column("day", "date", "DATE"),
        Column("extra", "json", "JSON_TEXT"),
        Column("raw"),
    ),
    ("id",),
)
ROW: Row = (1, 9.5, "Open", "007", Date("2024-02-01"), Json('{"a": 1}'), b"\x00")


def holds(where: str, *rows: Row, table: Table = ORDERS) -> list[bool]:
    return Predicates().condition(table, where).holds(rows or [ROW])


class Paths:
    """Counts how often each evaluator decided."""

    def __init__(self) -> None:
        self.python = self.both = self.engine = self.failed = 0

    def count(self, condition: SqliteCondition) -> None:
        program = condition._program
        if program is None:
            self.engine += 1
        elif program.is_whole:
            self.python += 1
        else:
            self.both += 1


def compare(seed: int, paths: Paths, predicates: int = 8) -> None:
    """Check that SQLite and both evaluators agree on random predicates over one random table."""
    world = RandomTable(seed)
    engine = Engine(world.table)
    for _ in range(predicates):
        where = world.predicate()
        expected = world.truth(where)
        condition = SqliteCondition(engine, where)
        if expected is None:  # SQLite fails on a row; we may have ruled that row out before
            paths.failed += 1
            with pytest.raises(InvalidRequest):
                engine.holds(where, condition._columns, world.rows)
            continue
        paths.count(condition)
        story = f"seed {seed}: {where}\n{world.table.columns}"
        assert engine.holds(where, condition._columns, world.rows) == expected, story
        assert condition.holds(world.rows) == expected, story
        check_pin(condition, world, expected, story)
    world.db.close()


def check_pin(condition: SqliteCondition, world: RandomTable, expected: list[bool], story: str) -> None:
    if (pin := condition.pin) is None:
        return
    place, encode = world.table.index[pin.column], order(world.table, [pin.column])
    for row, is_true in zip(world.rows, expected, strict=True):
        assert not is_true or encode((row[place],)) in pin.values, story


# --- the same truth as SQLite's --------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_predicate_matches_the_rows_that_sqlite_matches() -> None:
    paths = Paths()

    @examples(300)
    @given(st.integers(0, 2**32))
    def run(seed: int) -> None:
        compare(seed, paths)

    run()
    asked = paths.python + paths.both + paths.engine
    assert paths.python > asked / 4, vars(paths)  # Python really was asked
    assert paths.both > asked / 20 and paths.engine > asked / 10, vars(paths)
    assert paths.failed < asked / 5, vars(paths)


@pytest.mark.soak(seconds=30)
@pytest.mark.parametrize("place", range(int(os.environ.get("SOAK_SEEDS", "20"))))
def test_many_predicates_match_the_rows_that_sqlite_matches(place: int, fresh_number: int) -> None:
    for seed in range(fresh_number, fresh_number + 1_000):
        compare(seed, Paths())


@examples(60)
@given(st.integers(0, 2**32))
def test_values_are_ordered_as_sqlite_orders_them(seed: int) -> None:
    world = RandomTable(seed)
    for columns in ([world.names[0]], world.names):
        encode = order(world.table, columns)
        places = [world.table.index[name] for name in columns]
        ours = sorted(world.rows, key=lambda row: (encode(tuple(row[place] for place in places)), row[0]))
        theirs = [k for (k,) in world.db.execute(f"SELECT k FROM t ORDER BY {', '.join(columns)}, k")]
        assert [row[0] for row in ours] == theirs
    world.db.close()


@examples(60)
@given(st.integers(0, 2**32))
def test_computed_stored_value_equals_the_inserted_value(seed: int) -> None:
    world, predicates = RandomTable(seed), Predicates()
    for values, row in zip(world.given, world.rows, strict=True):
        if not any(map(is_broken, values)):
            found = predicates.stored(world.table, world.names, tuple(values))
            assert repr(found) == repr(row[1:]), (seed, world.table.columns, values)  # 1 is not 1.0, 0.0 not -0.0
    world.db.close()


@given(st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 2**22 + 300) | st.text() | st.floats(allow_nan=False))
def test_fast_key_encoding_equals_the_general_encoding(value: Any) -> None:
    for collation in ("BINARY", "NOCASE", "RTRIM"):
        table = Table("t", (Column("k", collation=collation),), ("k",))
        assert order(table, ["k"])((value,)) == encode_key((value,), [collation])


# --- what is compared with what --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("total > 9", True),
        ("total > '9'", True),  # a REAL column makes a number of the text
        ("code = 7", False),  # a TEXT column makes a text of the number
        ("code = '007' AND state = 'OPEN'", True),
        ("orders.state IN ('open', 'closed')", True),
        ("day >= '2024-01-01' AND day < '2024-03-01'", True),
        ("raw = x'00'", True),
        ("raw > 'zzz'", True),  # a blob is greater than any text
        ("json_extract(extra, '$.a') = 1", True),
        ("extra ->> 'a' = 1", True),
        ("state LIKE 'op%' AND id = 1", True),
        ("state IS NOT NULL", True),
        ("NULL", False),
        ("NOT NULL", False),
        ("id = 1 -- one", True),
        ("id /* ) */ = 1", True),
        ("ID = 1", True),
        ("id IN ()", False),
        ("id NOT IN (2, NULL)", False),
        ("state = 'OPEN' COLLATE BINARY", False),
        ("(id, code) = (1, '007')", True),
    ],
)
def test_predicate_compares_values_as_sqlite_does(where: str, expected: bool) -> None:
    assert holds(where) == [expected]


def test_condition_on_more_rows_than_a_batch_matches_each_row() -> None:
    rows = [(n, n * 1.0, "open" if n % 3 else "OPENED", "", None, None, None) for n in range(2_500)]
    assert holds("state LIKE 'open'", *rows) == [n % 3 != 0 for n in range(2_500)]
    assert holds("1 < 2", *rows) == [True] * 2_500
    assert Predicates().condition(ORDERS, "state LIKE 'open'").holds([]) == []


def test_text_that_is_not_utf_8_is_compared_by_its_bytes() -> None:
    rows = [(1, None, "a\udcff", "a\udcff", None, None, None), (2, None, "é", "é", None, None, None)]
    assert holds("code > 'é'", *rows) == holds("+code > 'é'", *rows) == [False, False]
    assert holds("code > 'az'", *rows) == holds("+code > 'az'", *rows) == [True, True]
    assert holds("length(CAST(code AS BLOB)) = 2 AND code LIKE 'a%'", *rows) == [True, False]


def test_broken_text_in_an_unread_column_is_ignored() -> None:
    row = (1, None, "\udcff", "x", None, None, None)
    assert holds("id + 0 = 1", row) == [True]


def test_hidden_rowid_is_matched_by_its_name() -> None:
    table = Table("t", (Column("a"), Column("rowid", "i64", hidden=True)), ("rowid",))
    assert holds("rowid = '7'", ("x", 7), table=table) == [True]
    assert holds("rowid + 0 = 7 AND a = 'x'", ("x", 7), ("x", 8), table=table) == [True, False]


@pytest.mark.parametrize("name", ["rowid", "oid", "_rowid_", "_headwater_place"])
def test_internal_batch_columns_are_refused_in_predicates(name: str) -> None:
    with pytest.raises(InvalidRequest, match="no such column"):
        holds(f"{name} = 1")


def test_names_that_need_quotes_are_matched_in_predicates() -> None:
    named = Table("t", (Column("true"), Column("a")))
    assert holds("a = true", (5, 5), (5, 1), table=named) == [True, False]
    table = Table('odd "t"', (Column("order", "i64", "INTEGER"), Column("a b"), Column("_headwater_place")))
    assert holds('"order" = 1 AND [a b] = 2 AND _headwater_place = 3', (1, 2, 3), table=table) == [True]


def test_predicate_uses_the_column_names_of_the_given_shape(rig: Callable[..., Rig]) -> None:
    made = rig("CREATE TABLE t(k INTEGER PRIMARY KEY, a TEXT COLLATE NOCASE, b AS (k * 2) STORED)")
    source = made.source
    older = source.describe()["t"]
    source.write(lambda session: session.execute("ALTER TABLE t RENAME COLUMN a TO c")).result(PATIENCE)
    newer = source.describe()["t"]
    assert source.condition(older, "a = 'X' AND b = 6").holds([(3, "x", 6)]) == [True]
    assert source.condition(newer, "c LIKE 'X' AND b = 6").holds([(3, "x", 6)]) == [True]
    with pytest.raises(InvalidRequest, match="no such column: a"):
        source.condition(newer, "a = 'x'")


def test_conditions_are_evaluated_correctly_by_many_threads() -> None:
    predicates = Predicates()
    where = ["state LIKE 'a%'", "state LIKE 'b%'"]
    rows = [(n, None, "abc"[n % 3], "", None, None, None) for n in range(300)]
    wrong: list[Any] = []

    def ask(which: int) -> None:
        condition = predicates.condition(ORDERS, where[which])
        expected = [n % 3 == which for n in range(300)]
        wrong.extend(found for _ in range(20) if (found := condition.holds(rows)) != expected)

    threads = [threading.Thread(target=ask, args=(n % 2,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- pins ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "column", "values"),
    [
        ("id = 1", "id", [1]),
        ("id = '1'", "id", [1]),
        ("5 = code", "code", ["5"]),
        ("state IN ('a', 'B', NULL)", "state", ["A", "b"]),
        ("id IN (1, 2, 3) AND code = 'x' AND total > 5", "code", ["x"]),
        ("(id = 1 AND state LIKE 'x%')", "id", [1]),
        ("id = 1 OR id = 2", None, []),
        ("NOT id = 1", None, []),
        ("id IS 1", None, []),
        ("id <> 1", None, []),
        ("+id = 1 AND id > 0", None, []),
        ("state = 'x' COLLATE BINARY", None, []),
    ],
)
def test_equality_that_every_matching_row_fulfils_is_found_as_the_pin(
    where: str, column: str | None, values: list[Any]
) -> None:
    pin = Predicates().condition(ORDERS, where).pin
    if column is None:
        assert pin is None
    else:
        assert pin is not None and pin.column == column
        assert pin.values == {order(ORDERS, [column])((value,)) for value in values}


# --- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "error", "reason"),
    [
        ("", InvalidRequest, "empty"),
        ("id = 1;", InvalidRequest, "one SQL expression"),
        ("id = 1; DELETE FROM orders", InvalidRequest, "one SQL expression"),
        ("1) OR (1", InvalidRequest, "one SQL expression"),
        ("1); DELETE FROM orders; SELECT (1", InvalidRequest, "one SQL expression"),
        ("id = 1) --", InvalidRequest, "one SQL expression"),
        ("id = 1 /*", InvalidRequest, "one SQL expression"),
        ("id = 1 ORDER BY id", InvalidRequest, "one SQL expression"),
        ("id = 1 LIMIT 1", InvalidRequest, "one SQL expression"),
        ("1, 2", InvalidRequest, "one SQL expression"),
        ("id = 1 \0", InvalidRequest, "NUL"),
        ("code = '\ud800'", InvalidRequest, "surrogates"),
        ("nope = 1", InvalidRequest, "no such column: nope"),
        ('state = "open"', InvalidRequest, "no such column"),
        ("other.id = 1", InvalidRequest, "no such column"),
        ("id = (SELECT 1)", NotSupported, "subqueries"),
        ("EXISTS (SELECT 1 FROM nowhere)", NotSupported, "subqueries"),
        ("id IN orders", NotSupported, "subqueries"),
        ("id IN (SELECT id FROM orders)", NotSupported, "subqueries"),
        ("id IN json_each('[1]')", NotSupported, "subqueries"),
        ("count(*) > 1", InvalidRequest, "aggregate"),
        ("max(id) > 1", InvalidRequest, "aggregate"),
        ("row_number() OVER () = 1", InvalidRequest, "window"),
        ("id = ?", InvalidRequest, "parameters"),
        ("id = :x", InvalidRequest, "parameters"),
        ("id = $x", InvalidRequest, "parameters"),
        ("id BETWEEN ?1 AND 5", InvalidRequest, "parameters"),
        ("random() > 0", NotSupported, "depends on more"),
        ("length(randomblob(3)) = 3", NotSupported, "depends on more"),
        ("changes() = 0", NotSupported, "depends on more"),
        ("total_changes() = 0", NotSupported, "depends on more"),
        ("last_insert_rowid() = 0", NotSupported, "depends on more"),
        ("day < current_timestamp", NotSupported, "depends on more"),
        ("day < date('now')", NotSupported, r"date\(\)"),
        ("datetime(day) > '2024'", NotSupported, r"datetime\(\)"),
        ("julianday(day) > 1", NotSupported, r"julianday\(\)"),
        ("strftime('%Y', day) = '2024'", NotSupported, r"strftime\(\)"),
        ("unixepoch(day) > 1", NotSupported, r"unixepoch\(\)"),
        ("load_extension('x')", NotSupported, "depends on more"),
        ("readfile('x') = ''", InvalidRequest, "no such function"),
        ("code REGEXP 'x'", InvalidRequest, "no such function"),
        ("code MATCH 'x'", NotSupported, "depends on more"),
        ("RAISE(ABORT, 'x')", InvalidRequest, "RAISE"),
        ("code COLLATE german = 'x'", InvalidRequest, "no such collation"),
        ("id = 1 OR " * 900 + "0", InvalidRequest, "nested too deeply"),
        ("(" * 3_000 + "id" + ")" * 3_000, InvalidRequest, "nested too deeply"),
        ("id = " + "1" * 10_000, InvalidRequest, "longer than"),
        ("raw = zeroblob(1000000000)", InvalidRequest, "too large"),
        ("printf('%.*c', 1000000000, 'x') = code", InvalidRequest, "too large"),
    ],
)
def test_filter_that_is_no_row_predicate_is_refused_with_a_reason(
    where: str, error: type[InvalidRequest], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        Predicates().condition(ORDERS, where)
    assert type(caught.value) is error and caught.value.hint


@pytest.mark.parametrize("form", ["1); {}; SELECT (1", "1; {}", "1); {}; --"])
def test_statement_appended_to_a_predicate_is_refused(form: str, tmp_path: Path) -> None:
    engine = Engine(ORDERS)
    for statement in (f"VACUUM INTO '{tmp_path / 'a'}'", f"ATTACH '{tmp_path / 'b'}' AS b", "DROP TABLE orders"):
        with pytest.raises(InvalidRequest):
            SqliteCondition(engine, form.format(statement))
    assert list(tmp_path.iterdir()) == []
    assert SqliteCondition(engine, "id + 0 = 1").holds([ROW]) == [True]


def test_conditions_on_columns_with_unknown_comparison_are_refused() -> None:
    table = Table("t", (Column("a", declared="ANY"), Column("b", declared="TEXT", collation="GERMAN")))
    for where in ("a = 1", "b = 'x'"):
        with pytest.raises(NotSupported):
            Predicates().condition(table, where)
    loose = Table("t", (Column("a", declared="ANY"), Column("b", declared="VARCHAR")))  # cannot be STRICT
    assert holds("a = '1'", (1, "x"), table=loose) == [True]


@pytest.mark.parametrize("where", ["json_extract(code, '$.a') = 1", "abs(id - 9223372036854775807 - 2) > 0"])
def test_predicate_that_fails_on_a_row_is_refused_with_a_message(where: str) -> None:
    condition = Predicates().condition(ORDERS, where)
    with pytest.raises(InvalidRequest, match="fails on a row"):
        condition.holds([ROW, (1, None, None, "not json", None, None, None)])
    assert condition.holds([(None, None, None, None, None, None, None)]) == [False]  # and it can be asked again


def test_expensive_predicate_is_stopped() -> None:
    slow = " AND ".join(["length(replace(hex(code || zeroblob(60000)), '0', '12')) > 0"] * 100)
    engine = Engine(ORDERS, seconds=0.05)
    with pytest.raises(InvalidRequest, match="takes too long"):
        SqliteCondition(engine, slow).holds([ROW] * 1_000)
    assert SqliteCondition(engine, "code || '' = '007'").holds([ROW]) == [True]


def test_predicate_reads_large_values_but_is_refused_when_it_makes_them() -> None:
    big = (1, None, "x" * 1_000_000, "", None, None, None)
    assert holds("upper(state) LIKE 'X%'", big) == [True]
    with pytest.raises(InvalidRequest, match="too large"):
        holds("length(state || state || state || state || state || state || state || state || state) > 1", big)


# --- what a column would hold ----------------------------------------------------------------------------------


def test_value_that_its_column_cannot_store_is_refused_with_a_reason() -> None:
    stored = Predicates().stored
    assert stored(ORDERS, ["id", "code"], ("7", 5)) == (7, "5")
    assert stored(ORDERS, ["day"], (Date("2024-01-01"),)) == (Date("2024-01-01"),)
    for value in ("x", 1.5, None, b"1"):
        with pytest.raises(InvalidRequest, match="integers only"):
            stored(ORDERS, ["id"], (value,))
    with pytest.raises(InvalidRequest, match="no column"):
        stored(ORDERS, ["nope"], (1,))
    strict = Table("t", (Column("k", declared="TEXT", nullable=False), Column("a", declared="ANY")), ("k",))
    with pytest.raises(InvalidRequest, match="NULL"):
        stored(strict, ["k"], (None,))
    assert stored(strict, ["a"], (5,)) == (5,)
    with pytest.raises(NotSupported):
        stored(strict, ["a"], ("5",))


def test_key_with_an_application_collation_has_no_order() -> None:
    with pytest.raises(NotSupported):
        order(Table("t", (Column("k", collation="GERMAN"),), ("k",)), ["k"])
    with pytest.raises(InvalidRequest):
        order(ORDERS, ["nope"])


def test_decimals_and_uuids_are_ordered_as_sqlite_does_in_chunks(rig: Callable[..., Rig]) -> None:
    made = rig("CREATE TABLE t(d DECIMAL_TEXT, u UUID_TEXT, PRIMARY KEY(d, u))")
    uuids = ["6b0c6a5e-0000-4000-8000-000000000001", "0b0c6a5e-0000-4000-8000-000000000001", "zz", ""]
    for number in ("10", "9", "-1", "1.50", "x"):
        for uuid in uuids:
            made.foreign.run("INSERT INTO t VALUES (?, ?)", number, uuid)
    chunk = made.source.chunk("t", after=None, span=None, limit=100)
    encode = made.source.order(chunk.table, ["d", "u"])
    places = [encode(chunk.table.key_of(row)) for row in chunk.rows]
    assert len(places) == 20 and places == sorted(places)


def test_apsw_errors_are_raised_as_invalid_requests() -> None:
    table = Table("t", tuple(Column(f"c{n}") for n in range(3_000)))
    with pytest.raises(InvalidRequest) as caught:
        Predicates().condition(table, "c1 = 1")
    assert not isinstance(caught.value, apsw.Error)
