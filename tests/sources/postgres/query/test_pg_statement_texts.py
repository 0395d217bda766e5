"""Texts of callers are scanned in one pass, whatever they contain."""

from headwater.sources.postgres.query.analysis.parameters import may_depend_on_clock
from headwater.sources.postgres.query.statement_rules import _WRITING_PLAN

BREAKS = "\n" * 1_000_000  # quadratic reading would take hours


def test_clock_words_in_strings_over_line_breaks_are_found_in_one_pass() -> None:
    assert not may_depend_on_clock(f"SELECT '{BREAKS}x")
    assert may_depend_on_clock("SELECT 'n' \n\n 'o'")


def test_plan_with_many_line_breaks_is_read_in_one_pass() -> None:
    assert not _WRITING_PLAN.search(f"Seq Scan on t\n  Filter: (a = '{BREAKS}')")
    for plan in ("Insert on t", "Result\n  CTE a\n    ->  Update on t", "LockRows", "  ->  Merge on t"):
        assert _WRITING_PLAN.search(plan)
    assert not _WRITING_PLAN.search("Seq Scan on inserts\n  Filter: (a = 'Delete')")
