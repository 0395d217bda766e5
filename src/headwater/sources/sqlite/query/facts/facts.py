"""Conditions that a row must satisfy to affect a result: combined tests of columns, and equal columns.

Every condition is necessary, never sufficient. An unknown part is left out of an AND, and makes a whole OR unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import msgspec

from headwater.model.dependencies.dependency import AllOf, AnyOf, Comparison, Condition, Const, Operand
from headwater.model.table import Column, Table
from headwater.sources.sqlite.query.affinity import affinity, doubt
from headwater.sources.sqlite.query.syntax import tree
from headwater.sources.sqlite.query.syntax.lexer import NotAnalysed

_EXACT = 2**53  # floats represent all integers up to this exactly
MAX_FORMULA = 2_000  # maximum number of tests for one occurrence of a table
MAX_WORK = 200_000  # maximum number of comparisons and operands: about a second of work


class ComparisonRule(tuple[str, str, bool, str]):
    """Comparison rule of a column: the class of its affinity, its collation, whether it may be NULL, its affinity."""

    __slots__ = ()

    @property
    def rule(self) -> tuple[str, str]:
        """Return the rule by which columns may be equated: two columns with one rule compare alike with any value."""
        return self[0], self[1]


class Occurrence(msgspec.Struct, eq=False):
    """One occurrence of a source; a query that is used several times has new occurrences for each use."""

    node: tree.Source | None
    used: set[str | int] = set()
    formulas: list[Formula] = []
    links: list[tuple[str | int, Col]] = []  # own column, and the column it must equal
    number: int = -1  # position among the occurrences of tables

    @property
    def table(self) -> Table | None:
        """Return the base table; None for another kind of source."""
        return cast("Table | None", self.node.table) if self.node is not None else None


Col = tuple[Occurrence, str | int]


class Atom(msgspec.Struct, frozen=True):
    """A test of one column by `op` with `operands`."""

    col: Col
    op: str
    operands: tuple[Operand, ...]


class All(msgspec.Struct, frozen=True):
    """A conjunction of formulas: every part holds."""

    parts: tuple[Formula, ...]


class Any_(msgspec.Struct, frozen=True):
    """A disjunction of formulas: at least one part holds."""

    parts: tuple[Formula, ...]


Formula = Atom | All | Any_
NEVER = Any_(())


class Fact(msgspec.Struct, frozen=True):
    """A condition that holds for every row that affects the result."""

    formula: Formula | None = None
    equal: tuple[Col, Col] | None = None
    rejects: frozenset[Occurrence] = frozenset()  # occurrences whose columns cannot all be NULL where the fact holds

    @property
    def about(self) -> set[Occurrence]:
        """Return the occurrences that the fact names."""
        found = {col[0] for col in cols(self.formula)} if self.formula is not None else set()
        return found | {col[0] for col in self.equal or ()}


def fact_of(formula: Formula) -> Fact:
    """Return the fact that `formula` holds."""
    return Fact(formula, None, rejected(formula))


class WorkLimit:
    """Limit on the comparisons and operands that one analysis handles, each counted every time it is handled."""

    def __init__(self) -> None:
        self._left = MAX_WORK

    def spend(self, facts: Iterable[Fact]) -> None:
        """Count the comparisons and operands in `facts`; raise NotAnalysed above the limit."""
        self._left -= sum(1 if fact.formula is None else _size(fact.formula) for fact in facts)
        if self._left < 0:
            raise NotAnalysed("the query has too many conditions for its joins and subqueries")


def _size(formula: Formula) -> int:
    if isinstance(formula, Atom):
        return 1 + len(formula.operands)
    return 1 + sum(map(_size, formula.parts))


def cols(formula: Formula) -> Iterator[Col]:
    """Yield the columns that a formula names."""
    if isinstance(formula, Atom):
        yield formula.col
    else:
        for part in formula.parts:
            yield from cols(part)


def moved(formula: Formula, to: dict[Col, Col]) -> Formula:
    """Return the formula with its columns replaced as `to` says."""
    if isinstance(formula, Atom):
        return Atom(to[formula.col], formula.op, formula.operands)
    return type(formula)(tuple(moved(part, to) for part in formula.parts))


def shares(formula: Formula) -> Iterator[Formula]:
    """Yield, for each occurrence in a formula over several, the part of the formula about this occurrence alone."""
    occurrences = {col[0] for col in cols(formula)}
    for occurrence in occurrences if len(occurrences) > 1 else ():
        found = _share(formula, occurrence)
        if found is not None:
            yield found


def _share(formula: Formula, occurrence: Occurrence) -> Formula | None:
    if isinstance(formula, Atom):
        return formula if formula.col[0] is occurrence else None
    parts = [_share(part, occurrence) for part in formula.parts]
    known = tuple(part for part in parts if part is not None)
    if isinstance(formula, All):
        return All(known) if known else None
    return Any_(known) if len(known) == len(parts) else None


def rejected(formula: Formula) -> frozenset[Occurrence]:
    """Return the occurrences that make the formula not true if all their columns are NULL."""
    if isinstance(formula, Atom):
        return frozenset({formula.col[0]}) if _is_strict(formula) else frozenset()
    sets = [rejected(part) for part in formula.parts]
    if isinstance(formula, All):
        return frozenset().union(*sets)
    return frozenset.intersection(*sets) if sets else frozenset()


def _is_strict(atom: Atom) -> bool:
    is_null = [isinstance(operand, Const) and operand.value is None for operand in atom.operands]
    if atom.op == "is":
        return isinstance(atom.operands[0], Const) and not is_null[0]
    if atom.op == "is_not":
        return is_null[0]
    return bool(atom.operands)


# --- columns -------------------------------------------------------------------------------------------------


def rule_of(ref: tree.Ref) -> ComparisonRule | None:
    """Return the comparison rule of a column; None unless the name resolves to a column of a table."""
    source = ref.source
    if source is None:
        return None
    if source.table is not None:
        return _column_kind(source.table, str(ref.column))
    if source.kind not in ("query", "view", "with") or source.query is None or source.query.is_recursive:
        return None
    return output_kind(source.query, int(ref.column))


def output_kind(query: tree.Query, place: int) -> ComparisonRule | None:
    """Return the comparison rule of an output column; None if the parts of a set operation differ."""
    # Cached: otherwise a query that is used twice at every level would be analysed 2ⁿ times.
    if place not in query.kinds:
        query.kinds[place] = _output_kind(query, place)
    return cast("ComparisonRule | None", query.kinds[place])


def _output_kind(query: tree.Query, place: int) -> ComparisonRule | None:
    kinds: list[ComparisonRule | None] = []
    for select in query.selects:
        of = select.outputs[place].of
        kinds.append(rule_of(of) if select.values is None and isinstance(of, tree.Ref) else None)
    first = kinds[0]
    if first is None or any(kind is None or kind.rule != first.rule or kind[3] != first[3] for kind in kinds):
        return None
    return ComparisonRule((*first.rule, any(kind[2] for kind in kinds if kind is not None), first[3]))


def _column_kind(table: Table, name: str) -> ComparisonRule | None:
    column = column_of(table, name)
    if column is None or doubt(table, column):
        return None
    is_numeric = affinity(column) in ("INTEGER", "REAL", "NUMERIC")
    may_be_null = column.nullable and not column.auto and not column.hidden
    rule = "NUMERIC" if is_numeric else affinity(column), column.collation
    return ComparisonRule((*rule, may_be_null, affinity(column)))


def column_of(table: Table, name: str) -> Column | None:
    """Return the column called `name`; None if there is none."""
    place = table.index.get(name)
    return None if place is None else table.columns[place]


# --- conversion to conditions --------------------------------------------------------------------------------


def condition_of(table: Table, formulas: list[Formula]) -> Condition:
    """Return the formulas of an occurrence as a condition on rows of `table`, without formulas it cannot express."""
    distinct: dict[Condition, None] = {}
    for formula in formulas:
        part = _condition(table, formula)
        parts = part.parts if isinstance(part, AllOf) else [] if part is None else [part]
        distinct.update(dict.fromkeys(parts))
    found = list(distinct)
    found = [part for part in found if not _is_idle(table, part, found)][:MAX_FORMULA]
    return found[0] if len(found) == 1 else AllOf(tuple(found))


def _is_idle(table: Table, part: Condition, among: list[Condition]) -> bool:
    """Return whether `part` is an IS NOT NULL that the column or another test already implies."""
    if not isinstance(part, Comparison) or part.op != "is_not" or part.operands != (Const(None),):
        return False
    column = column_of(table, part.column)
    if column is not None and (not column.nullable or column.auto or column.hidden):
        return True
    others = [other for other in among if isinstance(other, Comparison) and other.column == part.column]
    return any(other.op not in ("is", "is_not") for other in others)


def _condition(table: Table, formula: Formula) -> Condition | None:
    if isinstance(formula, Atom):
        column = column_of(table, str(formula.col[1]))
        if column is None or not all(_is_exact(column, operand) for operand in formula.operands):
            return None
        return Comparison(column.name, formula.op, formula.operands)
    parts = [_condition(table, part) for part in formula.parts]
    known = tuple(part for part in parts if part is not None)
    if isinstance(formula, All):
        return AllOf(known)
    return AnyOf(known) if len(known) == len(parts) else None


def _is_exact(column: Column, operand: Operand) -> bool:
    """Return whether the column can store the compared value exactly: a REAL column rounds large integers."""
    if affinity(column) != "REAL" or not isinstance(operand, Const):
        return True
    value: Any = operand.value
    return not isinstance(value, str) and (not isinstance(value, int) or abs(value) <= _EXACT)
