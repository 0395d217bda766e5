"""Texts of callers are read as PostgreSQL reads them, and in one pass, however they are made."""

from typing import Any

import pytest

from headwater.errors import Forbidden, InvalidRequest
from headwater.model.principal import EDITOR, OWNER, VIEWER
from headwater.sources.postgres.query import predicate_names
from headwater.sources.postgres.query.analysis.parameters import marked, may_depend_on_clock
from headwater.sources.postgres.query.analysis.volatile_calls import refuse
from headwater.sources.postgres.query.predicate_names import KnownNames, has_foreign_type, has_own_calls
from headwater.sources.postgres.query.statement_rules import _WRITING_PLAN, check_allowed, first_word, placed

BREAKS = "\n" * 1_000_000  # quadratic reading would take hours


def test_clock_words_in_strings_over_line_breaks_are_found_in_one_pass() -> None:
    assert not may_depend_on_clock(f"SELECT '{BREAKS}x")
    assert may_depend_on_clock("SELECT 'n' \n\n 'o'")


def test_plan_with_many_line_breaks_is_read_in_one_pass() -> None:
    assert not _WRITING_PLAN.search(f"Seq Scan on t\n  Filter: (a = '{BREAKS}')")
    for plan in ("Insert on t", "Result\n  CTE a\n    ->  Update on t", "LockRows", "  ->  Merge on t"):
        assert _WRITING_PLAN.search(plan)
    assert not _WRITING_PLAN.search("Seq Scan on inserts\n  Filter: (a = 'Delete')")


def test_carriage_return_ends_a_comment_as_in_postgres() -> None:
    assert first_word("--x\rSELECT 1") == "select"
    assert marked("SELECT --x\r :a").names == ("a",) and marked("SELECT 1 --x\r + $1").names == ("1",)
    assert placed("SELECT --x\r :a", {"a": 1}) == ("SELECT --x\r $1", [1])
    with pytest.raises(InvalidRequest, match="CREATE PUBLICATION"):
        check_allowed("CREATE --x\rPUBLICATION p")


@pytest.mark.parametrize("start", ["id", "(id)"])
def test_name_of_many_parts_is_read_in_one_pass(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0

    class CountedList(list[Any]):
        def __getitem__(self, place: Any) -> Any:
            nonlocal reads
            reads += 1
            return super().__getitem__(place)

    tokens = predicate_names._tokens
    monkeypatch.setattr(predicate_names, "_tokens", lambda where: CountedList(tokens(where)))
    known = KnownNames(columns={"id", "a"}, types=(), functions={"f"}, collations=(), keywords=())
    where = start + ".a" * 5_000
    assert not has_foreign_type(where, known) and not has_own_calls(where, known)
    assert reads < 20 * 5_000
    assert has_own_calls(f"{where}.b", known) and has_own_calls(f"{where}.f()", known)


@pytest.mark.parametrize(
    "name, role, needed",
    [
        ("random", VIEWER, EDITOR),
        ("app.f", VIEWER, EDITOR),
        ("pg_read_file", VIEWER, OWNER),
        ("pg_read_file", EDITOR, OWNER),
    ],
)
def test_refused_volatile_function_names_the_role_that_may_call_it(name: str, role: str, needed: str) -> None:
    with pytest.raises(Forbidden, match=f"needs the role {needed}") as raised:
        refuse([name], role)
    assert raised.value.details["role"] == needed
    refuse([name], needed)
