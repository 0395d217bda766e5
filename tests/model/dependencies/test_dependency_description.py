"""Dependencies in words."""

from __future__ import annotations

from headwater.model.dependencies.dependency import (
    AllOf,
    Analysis,
    AnyOf,
    Comparison,
    Condition,
    Const,
    Dependency,
    KeyGuard,
    Param,
    TopGuard,
)
from headwater.model.dependencies.description import of_condition, of_dependency, words
from headwater.model.literal import Date


def test_dependency_text_names_the_table_its_columns_and_the_row_condition() -> None:
    condition = AllOf((Comparison("customer", "eq", (Param("p1"),)), Comparison("total", "gt", (Const(5),))))
    place = Dependency("orders", frozenset({"total", "id"}), condition)
    assert of_dependency(place) == "orders: columns id, total; rows where customer = :p1 and total > 5"
    assert of_dependency(Dependency("t")) == "t: all columns; all rows"
    assert of_dependency(Dependency("t", frozenset())) == "t: no column, only which rows there are; all rows"


def test_condition_text_shows_operators_constants_parameters_and_nesting() -> None:
    a, b = Comparison("a", "is", (Const(None),)), Comparison("b", "between", (Const(1.5), Param("2")))
    cases: list[tuple[Condition, str]] = [
        (a, "a is null"),
        (b, "b between 1.5 and ?2"),
        (AnyOf((a, AllOf((a, b)))), "a is null or (a is null and b between 1.5 and ?2)"),
        (AllOf((AnyOf((a, b)), b)), "(a is null or b between 1.5 and ?2) and b between 1.5 and ?2"),
        (AllOf(), ""),
        (AnyOf(), "never"),
        (Comparison("c", "not_in", tuple(map(Const, range(10)))), "c not in (0, 1, 2, 3, 4, 5, 6, 7, and 2 more)"),
        (Comparison("c", "ne", (Const("it's"),)), "c <> 'it''s'"),
        (Comparison("c", "le", (Const(b"\x00"),)), "c <= x'00'"),
        (Comparison("c", "le", (Const(Date("2024-01-01")),)), "c <= '2024-01-01'"),
    ]
    for condition, text in cases:
        assert of_condition(condition) == text


def test_analysis_text_lists_dependencies_uncacheable_reasons_doubts_and_guards() -> None:
    analysis = Analysis(
        sql="",
        parameters=(),
        columns=(),
        tables=("t",),
        objects=("t",),
        dependencies=(Dependency("t"), Dependency("u")),
        epoch="",
        volatile=("random() may answer differently each time",),
        doubts=("a whim",),
        guards=(KeyGuard(1, "k", "", (0,)), TopGuard(0, (("a", True), ("b", False)), (0, 1), Const(3))),
    )
    assert words(analysis) == [
        "t: all columns; all rows",
        "u: all columns; all rows",
        "never cached: random() may answer differently each time",
        "in doubt: a whim",
        "rows that tie may come in any order",
        "while watched, of u only rows whose k is found in t",
        "while watched, of t only rows up to the last one shown, by a descending, b",
    ]
