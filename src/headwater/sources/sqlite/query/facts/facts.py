"""What must be true of a row for it to matter: tests of columns, combined, and columns that are equal.

Everything here is necessary, never sufficient. A part that is not understood is left out of AND, and takes an OR along.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from headwater.model.dependencies.dependency import AllOf, AnyOf, Condition, Const, Operand, Test
from headwater.model.table import Column, Table
from headwater.sources.sqlite.query.affinity import affinity, doubt
from headwater.sources.sqlite.query.syntax import tree
from headwater.sources.sqlite.query.syntax.lexer import Unsupported

_EXACT = 2**53  # integers up to here are floats, too
MAX_FORMULA = 2_000  # tests of one place
MAX_WORK = 200_000  # tests and operands: about a second


class Kind(tuple[str, str, bool, str]):
    """How a column compares: the class of its affinity, its collation, whether it may be NULL, its affinity."""

    __slots__ = ()

    @property
    def rule(self) -> tuple[str, str]:
        """Columns of one rule may be equated: what one compares equal to, the other does."""
        return self[0], self[1]


@dataclass(eq=False, slots=True)
class Instance:
    """One occurrence of a source, each time the query it stands in is read."""

    node: tree.Source | None
    used: set[str | int] = field(default_factory=set)
    formulas: list[Formula] = field(default_factory=list)
    links: list[tuple[str | int, Col]] = field(default_factory=list)  # own column, and one it must be equal to
    place: int = -1

    @property
    def table(self) -> Table | None:
        """The base table, if it is one."""
        return cast("Table | None", self.node.table) if self.node is not None else None


Col = tuple[Instance, str | int]


@dataclass(frozen=True, slots=True)
class Atom:
    """A test of one column."""

    col: Col
    op: str
    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class All:
    """Every part."""

    parts: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class Any_:
    """At least one part."""

    parts: tuple[Formula, ...]


Formula = Atom | All | Any_
NEVER = Any_(())


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that is true of every row that matters."""

    formula: Formula | None = None
    equal: tuple[Col, Col] | None = None
    rejects: frozenset[Instance] = frozenset()  # it is not true where all columns of such a one are NULL

    @property
    def about(self) -> set[Instance]:
        """What it names."""
        found = {col[0] for col in cols(self.formula)} if self.formula is not None else set()
        return found | {col[0] for col in self.equal or ()}


class Work:
    """Limits how many tests one analysis handles, each time it handles them."""

    def __init__(self) -> None:
        self._left = MAX_WORK

    def spend(self, facts: Iterable[Fact]) -> None:
        """Count the tests of `facts`; Unsupported once there were too many."""
        self._left -= sum(1 if fact.formula is None else _size(fact.formula) for fact in facts)
        if self._left < 0:
            raise Unsupported("its conditions are too many for its joins and queries inside each other")


def _size(formula: Formula) -> int:
    if isinstance(formula, Atom):
        return 1 + len(formula.operands)
    return 1 + sum(map(_size, formula.parts))


def cols(formula: Formula) -> Iterator[Col]:
    """The columns a formula names."""
    if isinstance(formula, Atom):
        yield formula.col
    else:
        for part in formula.parts:
            yield from cols(part)


def moved(formula: Formula, to: dict[Col, Col]) -> Formula:
    """The formula with other columns in place of its own."""
    if isinstance(formula, Atom):
        return Atom(to[formula.col], formula.op, formula.operands)
    return type(formula)(tuple(moved(part, to) for part in formula.parts))


def shares(formula: Formula) -> Iterator[Formula]:
    """What a formula over several instances says of each of them alone."""
    instances = {col[0] for col in cols(formula)}
    for instance in instances if len(instances) > 1 else ():
        found = _share(formula, instance)
        if found is not None:
            yield found


def _share(formula: Formula, instance: Instance) -> Formula | None:
    if isinstance(formula, Atom):
        return formula if formula.col[0] is instance else None
    parts = [_share(part, instance) for part in formula.parts]
    known = tuple(part for part in parts if part is not None)
    if isinstance(formula, All):
        return All(known) if known else None
    return Any_(known) if len(known) == len(parts) else None


def rejected(formula: Formula) -> frozenset[Instance]:
    """The instances whose NULLs make the formula not true."""
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


def kind_of(ref: tree.Ref) -> Kind | None:
    """How the column a name stands for compares; None where that is not a table's column all the way down."""
    source = ref.source
    if source is None:
        return None
    if source.table is not None:
        return _column_kind(source.table, str(ref.column))
    if source.kind not in ("query", "view", "with") or source.query is None or source.query.is_recursive:
        return None
    return output_kind(source.query, int(ref.column))


def output_kind(query: tree.Query, place: int) -> Kind | None:
    """The same of a column of an answer; of a set operation only where its parts agree."""
    if place not in query.kinds:  # a query that is read twice at every level would be asked 2ⁿ times
        query.kinds[place] = _output_kind(query, place)
    return cast("Kind | None", query.kinds[place])


def _output_kind(query: tree.Query, place: int) -> Kind | None:
    kinds: list[Kind | None] = []
    for select in query.selects:
        of = select.outputs[place].of
        kinds.append(kind_of(of) if select.values is None and isinstance(of, tree.Ref) else None)
    first = kinds[0]
    if first is None or any(kind is None or kind.rule != first.rule or kind[3] != first[3] for kind in kinds):
        return None
    return Kind((*first.rule, any(kind[2] for kind in kinds if kind is not None), first[3]))


def _column_kind(table: Table, name: str) -> Kind | None:
    column = column_of(table, name)
    if column is None or doubt(table, column):
        return None
    is_numeric = affinity(column) in ("INTEGER", "REAL", "NUMERIC")
    may_be_null = column.nullable and not column.auto and not column.hidden
    rule = "NUMERIC" if is_numeric else affinity(column), column.collation
    return Kind((*rule, may_be_null, affinity(column)))


def column_of(table: Table, name: str) -> Column | None:
    """The column called `name`."""
    place = table.index.get(name)
    return None if place is None else table.columns[place]


# --- out -----------------------------------------------------------------------------------------------------


def condition_of(table: Table, formulas: list[Formula]) -> Condition:
    """The formulas of a place as a condition on its rows, without those that cannot be told of its columns."""
    distinct: dict[Condition, None] = {}
    for formula in formulas:
        part = _condition(table, formula)
        parts = part.parts if isinstance(part, AllOf) else [] if part is None else [part]
        distinct.update(dict.fromkeys(parts))
    found = list(distinct)
    found = [part for part in found if not _is_idle(table, part, found)][:MAX_FORMULA]
    return found[0] if len(found) == 1 else AllOf(tuple(found))


def _is_idle(table: Table, part: Condition, among: list[Condition]) -> bool:
    """IS NOT NULL where the column cannot be, or where another test says so, too."""
    if not isinstance(part, Test) or part.op != "is_not" or part.operands != (Const(None),):
        return False
    column = column_of(table, part.column)
    if column is not None and (not column.nullable or column.auto or column.hidden):
        return True
    others = [other for other in among if isinstance(other, Test) and other.column == part.column]
    return any(other.op not in ("is", "is_not") for other in others)


def _condition(table: Table, formula: Formula) -> Condition | None:
    if isinstance(formula, Atom):
        column = column_of(table, str(formula.col[1]))
        if column is None or not all(_is_exact(column, operand) for operand in formula.operands):
            return None
        return Test(column.name, formula.op, formula.operands)
    parts = [_condition(table, part) for part in formula.parts]
    known = tuple(part for part in parts if part is not None)
    if isinstance(formula, All):
        return AllOf(known)
    return AnyOf(known) if len(known) == len(parts) else None


def _is_exact(column: Column, operand: Operand) -> bool:
    """Whether the column would hold the value as it is compared: a REAL column rounds large integers."""
    if affinity(column) != "REAL" or not isinstance(operand, Const):
        return True
    value: Any = operand.value
    return not isinstance(value, str) and (not isinstance(value, int) or abs(value) <= _EXACT)
