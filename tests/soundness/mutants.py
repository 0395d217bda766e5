"""Bugs put in on purpose, each by one patch of the real implementation: the kit must find those that are unsound.

The fourteen are those of reference/queries.md §5. Some only cause more invalidations than needed, or are masked by a
second check: they are listed too, and must not be found, so that the list stays true.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.soundness.differential_checker import Case
from tests.soundness.grammar import Query
from tests.soundness.schemas import Step

from headwater.model.change import Change, Op
from headwater.model.dependencies.dependency import AllOf, Analysis, AnyOf, Comparison, Condition, Const
from headwater.model.table import Table
from headwater.queries.dependencies.bound_dependencies import BoundDependencies
from headwater.sources.sqlite.query.analysis import analysis as analyse
from headwater.sources.sqlite.query.facts import facts, join_conditions, predicate_pushdown
from headwater.sources.sqlite.query.facts.facts import ComparisonRule, Fact, rule_of
from headwater.sources.sqlite.query.syntax import tree
from headwater.sources.sqlite.source import SqliteSource

Patch = Callable[[pytest.MonkeyPatch], None]


class Mutant(msgspec.Struct, frozen=True):
    """A bug; `schemas` is how many schemas the kit may need to find it, `why_not` says why it cannot be found.

    `found` is a case that finds it, so that nobody has to search for one. It is another one whenever the grammar is:
    `make soak` searches, and prints it. Where a search takes too long, `case` is one made by hand.
    """

    name: str
    patch: Patch
    schemas: int
    why_not: str = ""
    found: int | None = None
    case: Case | None = None


def _by_hand(query: str, *writes: str) -> Case:
    table = "CREATE TABLE t(k INTEGER PRIMARY KEY, a INTEGER, b TEXT, n TEXT COLLATE NOCASE, x)"
    rows = "INSERT INTO t VALUES (1, 1, '1', 'x', 1), (2, 2, 'x', 'X', 2), (3, 1, 'a', 'a', '1')"
    return Case([table, rows], [Query(query, {})], [Step([write]) for write in writes])


# --- of the matcher --------------------------------------------------------------------------------------------


def _matching(judge: Callable[[Callable[..., int | None], BoundDependencies, Change], int | None]) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = BoundDependencies.matters
        monkeypatch.setattr(BoundDependencies, "matters", lambda bound, change: judge(real, bound, change))

    return patch


def _after_only(real: Any, bound: BoundDependencies, change: Change) -> int | None:
    found: int | None = real(bound, change)
    if found is None or change.op is not Op.UPDATE:
        return found
    return real(bound, msgspec.structs.replace(change, op=Op.INSERT, before=None))  # type: ignore[no-any-return]


def _plain_equality(real: Any, bound: BoundDependencies, change: Change) -> int | None:
    if change.op is Op.UPDATE and change.before is not None and change.after is not None:
        pairs = zip(change.before, change.after, strict=True)
        change = msgspec.structs.replace(change, after=tuple(b if b == a else a for b, a in pairs))
    return real(bound, change)  # type: ignore[no-any-return]


def _no_deletes(real: Any, bound: BoundDependencies, change: Change) -> int | None:
    return None if change.op is Op.DELETE else real(bound, change)


def _first_place_only(real: Any, bound: BoundDependencies, change: Change) -> int | None:
    found = real(bound, change)
    return found if found == 0 else None


def _no_coercion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SqliteSource, "stored", lambda source, table, columns, values: values)


def _binary_order(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SqliteSource.order

    def order(source: SqliteSource, table: Table, columns: Any) -> Any:
        plain = tuple(msgspec.structs.replace(column, collation="BINARY") for column in table.columns)
        return real(source, msgspec.structs.replace(table, columns=plain), columns)

    monkeypatch.setattr(SqliteSource, "order", order)


# --- of what the extractor says --------------------------------------------------------------------------------


def _conditions(change: Callable[[Comparison], Condition]) -> Patch:
    """Return a patch that applies `change` to every comparison of every condition."""

    def walk(condition: Condition) -> Condition:
        if isinstance(condition, Comparison):
            return change(condition)
        return type(condition)(tuple(map(walk, condition.parts)))

    return _analyses(
        lambda analysis: msgspec.structs.replace(
            analysis,
            dependencies=tuple(
                msgspec.structs.replace(one, condition=walk(one.condition)) for one in analysis.dependencies
            ),
        )
    )


def _analyses(change: Callable[[Analysis], Analysis]) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = SqliteSource.analyse
        monkeypatch.setattr(SqliteSource, "analyse", lambda source, sql: change(real(source, sql)))

    return patch


def _positive(test: Comparison) -> Condition:
    ops = {"not_in": "in", "not_between": "between", "ne": "eq"}
    return msgspec.structs.replace(test, op=ops.get(test.op, test.op))


def _python_not(test: Comparison) -> Condition:
    """Treat NOT of an unknown value as true: NULL then passes every negated comparison."""
    if test.op not in ("ne", "not_in", "not_between"):
        return test
    return AnyOf((test, Comparison(test.column, "is", (Const(None),))))


def _not_in_without_null(test: Comparison) -> Condition:
    if test.op != "not_in":
        return test
    kept = tuple(one for one in test.operands if not (isinstance(one, Const) and one.value is None))
    return msgspec.structs.replace(test, operands=kept) if kept else AllOf()


def _strict_bounds(test: Comparison) -> Condition:
    return msgspec.structs.replace(test, op={"le": "lt", "ge": "gt"}.get(test.op, test.op))


def _all_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every order total before the epoch is computed, which is another for a total order."""
    real = analyse._understood
    monkeypatch.setattr(
        analyse, "_understood", lambda reader, sql: msgspec.structs.replace(real(reader, sql), is_total=True)
    )


# --- of the extractor ------------------------------------------------------------------------------------------


def _on_restricts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def outer(self: Any, kept: Any, made_up: Any, theirs: Any, others: Any, facts: list[Fact], on: list[Fact]) -> None:
        known = self._closed([fact for fact in facts if fact.about.isdisjoint(others)] + on)
        self.restrict(kept, join_conditions._without(known, others))
        self.restrict(made_up, join_conditions._without(known, theirs))

    monkeypatch.setattr(join_conditions._Join, "_outer", outer)


def _where_unmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    real = predicate_pushdown.Pushdown._mark

    def mark(self: Any, select: Any, *rest: Any) -> None:
        where, select.where = select.where, None
        try:
            real(self, select, *rest)
        finally:
            select.where = where

    monkeypatch.setattr(predicate_pushdown.Pushdown, "_mark", mark)


def _simplified(change: Callable[[str, list[Fact]], tuple[str, list[Fact]]]) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = join_conditions._simplified
        monkeypatch.setattr(
            join_conditions, "_simplified", lambda kind, facts, left, right: real(*change(kind, facts), left, right)
        )

    return patch


def _full_as_left(kind: str, facts: list[Fact]) -> tuple[str, list[Fact]]:
    return ("LEFT" if kind == "FULL" else kind), facts


def _all_reject_null(kind: str, facts: list[Fact]) -> tuple[str, list[Fact]]:
    return kind, [Fact(fact.formula, fact.equal, fact.rejects | frozenset(fact.about)) for fact in facts]


def _all_of_one_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ComparisonRule, "rule", ("", ""))


def _through_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    real = predicate_pushdown.Pushdown.query

    def query(self: Any, query: Any, asked: Any) -> None:
        limit, query.limit = query.limit, None
        try:
            real(self, query, asked)
        finally:
            query.limit = limit

    monkeypatch.setattr(predicate_pushdown.Pushdown, "query", query)


def _through_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicate_pushdown.SelectKind, "lets_through", lambda nature, ref: rule_of(ref) is not None)


def _through_any_set_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_branch(query: Any, place: int) -> ComparisonRule | None:
        select = query.selects[0]
        of = select.outputs[place].of
        return rule_of(of) if select.values is None and isinstance(of, tree.Ref) else None

    monkeypatch.setattr(facts, "output_kind", first_branch)
    monkeypatch.setattr(predicate_pushdown, "output_kind", first_branch)
    monkeypatch.setattr(predicate_pushdown, "_fits", lambda *_: True)


def _without_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        analyse.Analyses, "_epoch", lambda self, reader, found: self._definitions(reader, found.objects)
    )


MATCHER = [
    Mutant("only the after image is tested", _matching(_after_only), 60, found=3),
    Mutant(
        "== for changed columns",
        _matching(_plain_equality),
        200,
        case=_by_hand("SELECT k, x FROM t WHERE k = 1", "UPDATE t SET x = 1.0 WHERE k = 1"),
    ),
    Mutant("deletes are overlooked", _matching(_no_deletes), 20, found=1),
    Mutant("only the first place is tested", _matching(_first_place_only), 20, found=1),
    Mutant("constants are not coerced", _no_coercion, 400, found=15),
    Mutant("collations are ignored", _binary_order, 300, found=134),
    Mutant("negated tests are read as plain ones", _conditions(_positive), 200, found=1),
    Mutant("<= read as <", _conditions(_strict_bounds), 300, found=33),
    Mutant("every order is called total", _all_total, 20, found=1),
    Mutant("Python's not", _conditions(_python_not), 60, "lets more rows pass: careful, not unsound"),
    Mutant("NOT IN ignores NULL", _conditions(_not_in_without_null), 60, "lets more rows pass: careful, not unsound"),
]
EXTRACTOR = [
    Mutant("ON restricts the side that is kept", _on_restricts_all, 150, found=81),
    Mutant("columns of WHERE are not watched", _where_unmarked, 100, found=13),
    Mutant("FULL as LEFT", _simplified(_full_as_left), 400, found=80),
    Mutant("every condition refuses NULLs", _simplified(_all_reject_null), 300, found=80),
    Mutant("all columns compare alike", _all_of_one_rule, 400, found=131),
    Mutant("conditions go through LIMIT", _through_limit, 150, found=20),
    Mutant(
        "conditions go through windows and aggregates",
        _through_everything,
        1_500,
        case=_by_hand(
            "SELECT * FROM (SELECT a, count(*) OVER () AS c FROM t) WHERE a = 1",
            "INSERT INTO t(k, a) VALUES (9, 2)",
        ),
    ),
    Mutant(
        "conditions go through any set operation",
        _through_any_set_operation,
        1_500,
        case=_by_hand(
            "SELECT * FROM (SELECT n AS v FROM t WHERE k = 3 UNION SELECT b FROM t) WHERE v = 'q'",
            "INSERT INTO t(k, b) VALUES (9, 'Q')",  # which is 'q' by the collation of the first
        ),
    ),
    Mutant(
        "plans are overlooked",
        _without_plans,
        60,
        found=11,
        case=_by_hand(
            "SELECT (SELECT a FROM t WHERE a > 0)", "UPDATE t SET a = 3 WHERE k = 1", "CREATE INDEX i ON t(a)"
        ),
    ),
]
MUTANTS = [*MATCHER, *EXTRACTOR]
