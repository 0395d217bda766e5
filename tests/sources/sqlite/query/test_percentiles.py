"""Percentile functions in Python: equal to SQLite's, and interrupted by the clock."""

from __future__ import annotations

from typing import Any

import apsw
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.sources.sqlite.query import percentiles
from headwater.sources.sqlite.query.percentiles import SortedRuns, replace_percentiles

NUMBERS = st.integers(-5, 5) | st.integers(2**60, 2**60 + 9) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.lists(st.none() | NUMBERS, max_size=14)
FRACTIONS = st.sampled_from([0, 1, 0.5, 0.25, "0.5", ".5x", " 0.3 ", "1e-1", None, -1, 2, 50, 100, b"0.5"]) | st.floats(
    0, 1
)
CALLS = st.sampled_from(["median(v)", "percentile(v, ?1)", "percentile_cont(v, ?1)", "percentile_disc(v, ?1)"])
WINDOWS = st.sampled_from(
    [
        "",
        " FILTER (WHERE v > 0)",
        " OVER ()",
        " OVER (ORDER BY k)",
        " OVER (ORDER BY k ROWS BETWEEN 2 PRECEDING AND 1 FOLLOWING)",
        " OVER (ORDER BY k ROWS BETWEEN 3 PRECEDING AND 2 PRECEDING)",
        " OVER (ORDER BY k ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING)",
    ]
)


@pytest.fixture(scope="module")
def both() -> tuple[apsw.Connection, apsw.Connection]:
    builtin, replaced = apsw.Connection(":memory:"), apsw.Connection(":memory:")
    replace_percentiles(replaced, lambda: None)
    return builtin, replaced


def _answer(db: apsw.Connection, sql: str, values: list[Any]) -> Any:
    try:
        return db.execute(sql, values).fetchall()
    except apsw.Error as error:
        return type(error), str(error)


@given(CALLS, WINDOWS, FRACTIONS, VALUES, st.integers(1, 20))
@example("percentile(v, ?1)", "", 50, [1, "x"], 5)
@example("median(v)", "", 50, [1, "3"], 5)
@example("percentile_disc(v, ?1)", " OVER ()", 0.5, [1, b"3"], 5)
@example("percentile_cont(v, ?1)", "", 0.5, [1, float("inf")], 5)
def test_percentiles_equal_the_built_in(
    both: tuple[apsw.Connection, apsw.Connection], call: str, window: str, fraction: Any, values: list[Any], run: int
) -> None:
    rows = " UNION ALL ".join(f"SELECT {n} AS k, ?{n + 2} AS v" for n in range(len(values)))
    sql = f"SELECT {call}{window}, ?1 FROM ({rows or 'SELECT 1 AS k, 1 AS v WHERE 0'})"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(percentiles, "RUN", run)
        found = [_answer(db, sql, [fraction, *values]) for db in both]
    assert found[0] == found[1]


def test_fraction_that_differs_between_rows_is_refused_as_by_the_built_in(
    both: tuple[apsw.Connection, apsw.Connection],
) -> None:
    sql = "SELECT percentile(column1, column2) FROM (VALUES (1, 50), (2, ?))"
    for other in (50.0, 50.05, 60):
        found = [_answer(db, sql, [other]) for db in both]
        assert found[0] == found[1]


def test_sorted_runs_return_the_number_at_each_rank_after_adds_and_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(percentiles, "RUN", 10)
    numbers = [float(n * 7919 % 101 - 50) / 3 for n in range(101)]
    runs = SortedRuns(lambda: None)
    for number in numbers:
        runs.add(number)
    assert [runs.at(place) for place in range(101)] == sorted(numbers)
    for number in numbers[:50]:
        runs.remove(number)
    assert [runs.at(place) for place in range(len(runs))] == sorted(numbers[50:])


def test_clock_is_checked_before_each_run_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(percentiles, "RUN", 10)
    checks: list[int] = []
    runs = SortedRuns(lambda: checks.append(1))
    for number in range(100):
        runs.add(float(number))
    assert len(checks) == 10
