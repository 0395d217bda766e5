"""Predicates: the time to parse one, and which of them the event loop may evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headwater.model.table import Column, Row, Table
from headwater.sources.sqlite.query.syntax.expressions import Expressions
from headwater.sources.sqlite.query.syntax.parser import parse_expression
from headwater.sources.sqlite.query.where import Predicates

ORDERS = Table(
    "orders",
    (
        Column("id", "i64", "INTEGER", auto=True),
        Column("total", "f64", "REAL"),
        Column("state", "str", "TEXT", collation="NOCASE"),
        Column("code", "str", "TEXT"),
        Column("any"),
    ),
    ("id",),
)
ODD_ROWS: list[Row] = [
    (1, value, value, value, value) for value in (None, 0, 1, -2.5, "", "paid", "5 apples", b"", b"\x00\xff", True)
]
NESTED = {
    "char": ("char(", ")"),
    "jsonb": ("jsonb(", ")"),
    "brackets": ("(", ")"),
    "row": ("(1, ", ") = (1, 2)"),
    "case": ("CASE WHEN ", " THEN 1 END"),
    "cast": ("CAST(", " AS INT)"),
    "in": ("code IN (", ")"),
    "between": ("code BETWEEN (", ") AND 2"),
    "not": ("NOT (", ")"),
    "interval": ("interval(", ")"),
    "decimal": ("decimal(", ", 2)"),
    "quoted": ('"char"(', ")"),
}


def nested(shape: str, depth: int) -> str:
    opening, closing = NESTED[shape]
    return opening * depth + "code" + closing * depth


@pytest.mark.parametrize("function", ["char", "jsonb", "json"])
def test_type_names_called_as_nested_functions_do_not_hang_the_parser(function: str) -> None:
    where = f"code IS NULL AND {f'{function}(' * 40}code{')' * 40} IS NOT 1"
    condition = Predicates().condition(ORDERS, where)
    assert condition.holds([(1, None, None, None, None), (2, None, None, "1", None)]) == [True, False]


@pytest.mark.parametrize("shape", sorted(NESTED))
def test_parser_steps_are_linear_in_the_depth_of_an_expression(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    primary = Expressions._primary

    def counted(self: Expressions) -> Any:
        nonlocal calls
        calls += 1
        return primary(self)

    monkeypatch.setattr(Expressions, "_primary", counted)
    counts = []
    for depth in (6, 12):
        calls = 0
        parse_expression(nested(shape, depth))
        counts.append(calls)
    assert counts[1] <= 2 * counts[0]


@pytest.mark.parametrize(
    "where",
    [
        "id = 5",
        "5 = id",
        "total > 100",
        "total >= -1.5",
        "state = 'paid'",
        "state == 'it''s'",
        "state <> 'paid' AND total < 10",
        "id IN (1, 2, 3)",
        "state NOT IN ('paid', 'open')",
        "id = 1 OR state = 'open' OR code IS NULL",
        "NOT (id = 1 OR total IS NOT NULL)",
        "code NOTNULL AND state ISNULL",
        "total BETWEEN 1 AND 2",
        "total NOT BETWEEN 1 AND 2",
        '"orders"."state" = \'paid\' -- a comment',
        "any IS 5 AND any IS NOT 'x'",
        "id = TRUE",
        "(((id))) = (5)",
    ],
)
def test_condition_that_python_decides_for_every_row_is_cheap(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    condition = Predicates().condition(ORDERS, where)
    expected = condition._ask(ODD_ROWS)
    assert condition.is_cheap

    def ask(rows: Sequence[Row]) -> list[bool]:
        raise AssertionError("the event loop would wait for the engine")

    monkeypatch.setattr(condition, "_ask", ask)
    assert condition.holds(ODD_ROWS) == expected


@pytest.mark.parametrize(
    "where", ["code", "NOT code", "total", "id = 1 OR code", "id = 1 AND any", "length(code) = 1", "id + 1 = 2"]
)
def test_condition_that_may_need_the_engine_is_not_cheap(where: str) -> None:
    condition = Predicates().condition(ORDERS, where)
    assert not condition.is_cheap
    assert condition.holds(ODD_ROWS) == condition._ask(ODD_ROWS)


@pytest.mark.parametrize("where", ["state = 'paid' AND length(code) > 1", "id = 1 AND (code OR TRUE)"])
def test_condition_that_python_evaluates_in_part_has_a_pin_and_the_rows_of_sqlite(where: str) -> None:
    condition = Predicates().condition(ORDERS, where)
    assert condition.pin is not None
    assert condition.holds(ODD_ROWS) == condition._ask(ODD_ROWS)
