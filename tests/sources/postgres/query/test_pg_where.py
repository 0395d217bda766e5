"""`where` on PostgreSQL: what is refused, what Python evaluates itself, and that its results are PostgreSQL's."""

from __future__ import annotations

import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from tests.sources.postgres.pg_database import Rig

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.literal import UNAVAILABLE
from headwater.model.table import Column, Table
from headwater.sources.postgres.key_order import order
from headwater.sources.postgres.query.where import PostgresCondition, Predicates

Attach = Callable[..., Rig]
T = """CREATE TABLE t(id int PRIMARY KEY, big bigint, n numeric, s text, vc varchar(9), c char(4), b bool, d date,
ts timestamp, tz timestamptz, u uuid, f float8, j jsonb, arr int[], "Odd ""c" text, raw bytea)"""


def condition_factory(r: Rig) -> Callable[[str], PostgresCondition]:
    """Return a function that compiles a predicate on table `t` to its condition."""
    predicates = Predicates(r.pool, r.columns.odd)
    table = r.do(lambda s: s.describe("t"))
    return lambda where: predicates.condition(table, where)


INVALID = ["", "  ", "id", "id =", "id = 1 id", "1) OR (1", "id = 1; SELECT 1", "nope = 1", "id = 'x'", "id = $1"]
INVALID += ["id = 1 ORDER BY id", 's = "x"', "1", "id = 1\0", "other.id = 1", "x" * 20_000]
UNSERVED = ["id = (SELECT 1)", "EXISTS (SELECT 1)", "random() < 1", "now() > tz", "count(*) > 1", "tz > 'now'"]
UNSERVED += [
    "d = ' Today '",
    "row_number() OVER () = 1",
    "generate_series(1, 2) = 1",
    "current_user = s",
    "tz::text = s",
]
ENGINE = [
    "lower(s) = 'a'",
    "s LIKE 'a%'",
    "n * 2 = 3",
    "f > 1",
    "j @> '{\"a\": 1}'",
    "id = ANY (arr)",
    "s || vc = 'ab'",
]
ENGINE += ["big = id", "coalesce(s, 'x') = 'x'", "raw = '\\x00'", "t IS NULL", "CASE WHEN b THEN id = 1 ELSE false END"]
PYTHON = ["id = 1", "1 = id", "id <> 1", "NOT id = 1", "id IN (1, 2)", "id NOT IN (1, 2)", "id BETWEEN 1 AND 3", "b"]
PYTHON += ["NOT b", "b IS TRUE", "b IS NOT TRUE", "s IS NULL", "s IS NOT NULL", "s = 'it''s'", "vc = 'a'", "c = 'a  '"]
PYTHON += ["vc IN ('a', 'b')", "d >= '2024-01-01'", "ts < '2024-01-01 10:00'", "tz > '2024-01-01 10:00+02'", "n = 1"]
PYTHON += ["n > 1.5", "big > -5", "id > 3000000000", "u = '00000000-0000-0000-0000-000000000001'", "s > 'a'"]
PYTHON += ["id = 1 AND (s = 'a' OR NOT b) AND n < 5", '"Odd ""c" = \'x\'', "id = 1 -- comment", "T.id = 1", "true"]
PYTHON += ["id IN (1, NULL)", "s = NULL", "(id = 1) AND (id = 2 OR b)", "id = 1 OR id = 2 OR id = 3"]
PYTHON += ["id IS DISTINCT FROM 1", "s IS NOT DISTINCT FROM NULL", "vc IS NOT DISTINCT FROM 'a'"]


def test_filter_that_is_no_row_predicate_is_refused_by_postgres(pg_rig: Attach) -> None:
    condition = condition_factory(pg_rig(T))
    for where in INVALID:
        with pytest.raises(InvalidRequest) as found:
            condition(where)
        assert found.value.code == "invalid_request", where
    for where in UNSERVED:
        with pytest.raises(NotSupported):
            print(where, condition(where))


def test_predicate_nested_deeper_than_python_allows_is_judged_by_postgres(pg_rig: Attach) -> None:
    r = pg_rig(T)
    where = "id = 0"
    for depth in range(300):
        where = f"id = {depth} {'OR' if depth % 2 else 'AND'} ({where})"
    condition = condition_factory(r)(where)
    table = r.do(lambda s: s.describe("t"))
    rows = [tuple({"id": id}.get(name) for name in table.names) for id in (1, 2, 299)]
    assert not condition.is_cheap and condition.holds(rows) == [False, False, True]


def test_simple_predicates_are_evaluated_in_python_and_pin_their_column(pg_rig: Attach) -> None:
    r = pg_rig(T)
    condition = condition_factory(r)
    table = r.do(lambda s: s.describe("t"))
    for where in PYTHON:
        assert condition(where).is_cheap, (where, condition(where)._found)
    for where in ENGINE:
        assert not condition(where).is_cheap, where

    def pinned(where: str, column: str, *values: Any) -> None:
        pin = condition(where).pin
        assert pin is not None and pin.column == column, where
        assert pin.values == {order(table, [column])((value,)) for value in values}, where

    pinned("id = 5 AND lower(s) = 'x'", "id", 5)
    pinned("id IN (5, 6) AND s = 'a'", "s", "a")
    pinned("n = 1 AND b", "n", Decimal("1.00"))
    pinned("u = '00000000-0000-0000-0000-000000000001'", "u", UUID(int=1))
    assert condition("id = 1 OR s = 'a'").pin is None
    assert condition("lower(s) = 'a'").pin is None


def test_predicate_that_an_unavailable_value_may_fulfil_is_true(pg_rig: Attach) -> None:
    r = pg_rig(T)
    condition = condition_factory(r)
    table = r.do(lambda s: s.describe("t"))
    row = tuple(5 if name == "id" else UNAVAILABLE for name in table.names)
    for where, may in [
        ("n > 5", True),
        ("id = 5 AND n > 5", True),
        ("id = 6 AND n > 5", False),
        ("lower(s) = 'a'", True),
        ("id = 6 AND lower(s) = 'a'", False),
        ("id = 6", False),
        ("id % 2 = 0", False),
    ]:
        assert condition(where).holds([row]) == [may], where


def test_predicate_that_fails_on_a_row_is_refused_with_a_message(pg_rig: Attach) -> None:
    r = pg_rig(T)
    condition = condition_factory(r)
    table = r.do(lambda s: s.describe("t"))
    rows = [tuple(value if name == "id" else None for name in table.names) for value in (1, 0)]
    with pytest.raises(InvalidRequest, match="fails on a row"):
        condition("10 / id > 1").holds(rows)
    assert condition("10 / nullif(id, 0) > 1").holds(rows) == [True, False]


def test_predicate_on_an_older_shape_uses_the_types_of_that_shape(pg_rig: Attach) -> None:
    r = pg_rig("CREATE TYPE mood AS ENUM ('sad', 'ok')", "CREATE DOMAIN small AS int CHECK (VALUE < 100)")
    predicates = Predicates(r.pool, r.columns.odd)
    columns = (Column("id", "i64", "bigint"), Column("m", "str", "mood"), Column("x", "str", "gone_type"))
    table = Table(
        "s.old", (*columns, Column("d", "i64", "small"), Column("v", "str", "character(3)", collation="RTRIM")), ("id",)
    )
    rows = [(1, "sad", "?", 500, "a  "), (2, "ok", "?", None, "b  ")]
    for where, wanted in [("m > 'sad'", [False, True]), ("d = 500", [True, False]), ("v = 'a'", [True, False])]:
        assert predicates.condition(table, where).holds(rows) == wanted
    with pytest.raises(InvalidRequest, match="x"):
        predicates.condition(table, "x = '?'")


OWN_FILTERS = r"""
m = 'sad'
m = 'sad'::own_mood
m > own_mood 'sad'
'glad'::public.own_mood = ANY (ms)
ms = ARRAY['sad']::own_mood[]
ms = '{sad}'
array[]::own_mood[] = ms
d = 5
d = 5::own_small
d = CAST(id AS own_small)
(p).street = 'x' AND (p).number > 3
p = row('x', 1)::own_place
array[]::int[] IS NOT NULL
id::bigint = 5 AND id::int8 = 5 AND id::pg_catalog.int4 = 5 AND id::double precision > 1.0
CAST(note AS varchar(3)) = 'abc' AND note::character varying = 'x'
note LIKE 'a%' ESCAPE '!' OR note ILIKE 'B%' OR note SIMILAR TO 'c'
note IN ('a', 'b') AND note BETWEEN 'a' AND 'c' AND note IS DISTINCT FROM 'b'
tz > timestamp with time zone '2024-01-01 00:00+00' AND tz > timestamptz '2024-01-01 00:00+00'
tz > '2024-01-01 00:00+00' AND tz AT TIME ZONE 'UTC' > timestamp '2024-01-01'
(tz AT TIME ZONE 'UTC')::date > date '2024-01-01'
n > numeric(5, 2) '1.5'
raw = '\x00' AND x'1f'::int = 31 AND B'101' = B'101' AND E'a\n' = note
trim(both 'x' from note) = 'y' AND position('x' in note) > 0 AND extract(year from tz AT TIME ZONE 'UTC') > 1
span @> 5 AND span && int4range(1, 5) AND span = '[1,2)'::int4range
note COLLATE "C" < 'x' AND lower(note) = 'a'
coalesce(note, 'x') = left('x', 1) AND overlay(note placing 'x' from 1) = 'x'
t.id = 1 AND t IS NOT NULL AND t.* IS NOT NULL
CASE note WHEN 'a' THEN true ELSE 'b' = note END
(id, note) IN ((1, 'a'), (2, 'b')) AND row(id, note) = row(1, 'x')
""".strip().splitlines()


def test_predicate_with_types_of_own_columns_and_built_in_ones_is_accepted(pg_rig: Attach) -> None:
    r = pg_rig(
        "CREATE TYPE own_mood AS ENUM ('sad', 'glad')",
        "CREATE DOMAIN own_small AS int",
        "CREATE TYPE own_place AS (street text, number own_small)",
        "CREATE TABLE t (id int PRIMARY KEY, m own_mood, ms own_mood[], d own_small, p own_place, note text, "
        "tz timestamptz, n numeric, raw bytea, span int4range)",
    )
    condition = condition_factory(r)
    refused = {}
    for where in OWN_FILTERS:
        try:
            assert condition(where).calls == (), where
        except InvalidRequest as error:
            refused[where] = error.message
    assert refused == {}


# --- Python's word is PostgreSQL's -----------------------------------------------------------------------

VALUES: dict[str, list[str]] = {
    "id": ["0", "1", "-1", "2147483647", "-2147483648", "7"],
    "big": ["0", "1", "-9223372036854775808", "9223372036854775807", "2147483648"],
    "n": ["0", "1", "1.0", "1.50", "-1.5", "NaN", "Infinity", "-Infinity", "1e25", "0.00000000000000000001"],
    "s": ["", "a", "A", "a ", "b", "it's", "é", "\uffff", "\U0001f600", "a\\b", "NULL"],
    "vc": ["", "a", "b", "a ", "ab", "1"],
    "c": ["", "a", "a b", "b", "ab"],
    "b": ["true", "false"],
    "d": ["2024-01-01", "2024-02-29", "infinity", "-infinity", "0044-03-15 BC", "12000-01-01", "0001-01-01"],
    "ts": [
        "2024-01-01 10:00",
        "2024-01-01 10:00:00.5",
        "infinity",
        "0044-03-15 01:00 BC",
        "2023-12-31 23:59:59.999999",
    ],
    "tz": [
        "2024-01-01 10:00+00",
        "2024-01-01 12:00+02",
        "-infinity",
        "2024-01-01 10:00:00.5+00",
        "20000-01-01 00:00+00",
    ],
    "u": ["00000000-0000-0000-0000-000000000001", "ffffffff-ffff-ffff-ffff-ffffffffffff"],
    "f": ["0", "-0", "1.5", "NaN", "Infinity", "1e300"],
}
COMPARISONS = ["=", "<>", "<", "<=", ">", ">=", "IS DISTINCT FROM", "IS NOT DISTINCT FROM"]


class World:
    """Random rows, and predicates over them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = list(VALUES)

    def literal(self, name: str) -> str:
        if self.random.random() < 0.06:
            return "NULL"
        text = self.random.choice(VALUES[name])
        bare = name in ("id", "big", "n") and text.lstrip("-").replace(".", "").isdigit()
        return text if bare and self.random.random() < 0.7 else "'" + text.replace("'", "''") + "'"

    def simple(self) -> str:
        name = self.random.choice(self.names)
        column, other = f'"{name}"', self.literal(name)
        match self.random.randrange(9):
            case 0:
                return f"{column} IS {self.random.choice(['', 'NOT '])}NULL"
            case 1:
                options = ", ".join(self.literal(name) for _ in range(self.random.randint(1, 4)))
                return f"{column} {self.random.choice(['', 'NOT '])}IN ({options})"
            case 2:
                return f"{column} {self.random.choice(['', 'NOT '])}BETWEEN {other} AND {self.literal(name)}"
            case 3:
                return self.random.choice(["b", "NOT b", "b IS TRUE", "b IS NOT FALSE", "b IS UNKNOWN", "b = true"])
            case 4:
                return f"{other} {self.random.choice(COMPARISONS[:6])} {column}"
            case 5:
                return self.random.choice(
                    ["lower(s) = 'a'", "id = big", "n * 2 > id", "s LIKE 'a%'", "id > 1.5", "n > id"]
                )
            case _:
                return f"{column} {self.random.choice(COMPARISONS)} {other}"

    def predicate(self, depth: int = 3) -> str:
        if not depth or self.random.random() < 0.35:
            return self.simple()
        left, right = self.predicate(depth - 1), self.predicate(depth - 1)
        forms = [f"{left} AND {right}", f"{left} OR {right}", f"NOT ({left})", f"({left} OR {right}) AND {right}"]
        return self.random.choice([*forms, f"({left}) AND ({right})", f"NOT ({left} AND {right})"])


@pytest.mark.parametrize("seed", range(3))
def test_python_evaluates_predicates_as_postgres_does(pg_rig: Attach, seed: int) -> None:
    r = pg_rig(T)
    world = World(seed)
    for number in range(60):
        cells = {n: None if world.random.random() < 0.15 else world.random.choice(VALUES[n]) for n in VALUES}
        cells["id"] = str(number) if number > 5 else VALUES["id"][number]
        names, marks = ", ".join(cells), ", ".join(["%s"] * len(cells))
        r.stream.db.execute(f"INSERT INTO t({names}) VALUES ({marks}) ON CONFLICT DO NOTHING", [*cells.values()])
    rows = r.do(lambda s: s.select("t", None))
    condition = condition_factory(r)
    judged = whole = 0
    for _ in range(80):
        where = world.predicate()
        theirs = {key for (key,) in r.stream.db.execute(f"SELECT id FROM t WHERE ({where})".encode()).fetchall()}
        found = condition(where)
        assert found.holds(rows) == [row[0] in theirs for row in rows], where
        judged += found._program is not None
        whole += found.is_cheap
        if found.pin is not None:
            place = order(r.do(lambda s: s.describe("t")), [found.pin.column])
            at = r.do(lambda s: s.describe("t")).index[found.pin.column]
            assert all(place((row[at],)) in found.pin.values for row in rows if row[0] in theirs), where
    assert judged > 25 and whole > 10
