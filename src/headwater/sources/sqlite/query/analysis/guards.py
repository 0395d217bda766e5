"""Guards: facts from one run of a query about the rows that can affect its result until the next run."""

from __future__ import annotations

from collections.abc import Iterator

from headwater.model.dependencies.dependency import (
    AllOf,
    AnyOf,
    Comparison,
    Condition,
    Const,
    Dependency,
    Guard,
    KeyGuard,
    Operand,
    Param,
    TopGuard,
)
from headwater.sources.sqlite.connection import ident
from headwater.sources.sqlite.query.determinism.result_order import Ordered
from headwater.sources.sqlite.query.facts.facts import Occurrence
from headwater.sources.sqlite.query.facts.predicate_pushdown import Pushdown
from headwater.sources.sqlite.query.facts.row_identity import place_of
from headwater.sources.sqlite.query.facts.select_kind import SelectKind
from headwater.sources.sqlite.query.query_sql import constant
from headwater.sources.sqlite.query.syntax import tree
from headwater.sources.sqlite.types import to_stored

_SIGNS = {"eq": "=", "ne": "<>", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "is": "IS", "is_not": "IS NOT"}


def guards_of(
    push: Pushdown,
    query: tree.Query,
    ordered: Ordered,
    dependencies: tuple[Dependency, ...],
    parameters: tuple[str, ...],
) -> tuple[Guard, ...]:
    """Return the key guards of a query, and the guard of its first rows if its order is total and it has a LIMIT."""
    found: list[Guard] = list(_key_guards(push, dependencies, parameters))
    top = _top_guard(push, query, ordered, parameters)
    return (*found, top) if top is not None else tuple(found)


def _key_guards(
    push: Pushdown, dependencies: tuple[Dependency, ...], parameters: tuple[str, ...]
) -> Iterator[KeyGuard]:
    for mine in push.occurrences:
        if _is_pinned(dependencies[mine.number].condition):
            continue  # the condition already fixes the key
        for column, (other, theirs) in mine.links:
            text = _keys(other, str(theirs), dependencies, parameters)
            if text is not None and other is not mine:
                yield KeyGuard(mine.number, str(column), text, (other.number,))
                break


def _is_pinned(condition: Condition) -> bool:
    parts = condition.parts if isinstance(condition, AllOf) else (condition,)
    return any(isinstance(part, Comparison) and part.op in ("eq", "in", "is") for part in parts)


def _keys(
    other: Occurrence, column: str, dependencies: tuple[Dependency, ...], parameters: tuple[str, ...]
) -> str | None:
    """Return the SELECT of the values of `column` in the relevant rows of `other`; None if it would find most rows."""
    if other.table is None or other.number < 0 or not _selects(dependencies[other.number].condition):
        return None
    where = _where(dependencies[other.number].condition, parameters)
    if parameters:  # the guard must take as many arguments as the query
        where += f" AND ?{len(parameters)} IS ?{len(parameters)}"
    return f"SELECT DISTINCT {ident(column)} FROM main.{ident(other.table.name)} WHERE {where}"


def _selects(condition: Condition) -> bool:
    """Return whether the condition is more than IS NOT NULL tests, which would select nearly all keys."""
    parts = condition.parts if isinstance(condition, AllOf) else (condition,)
    return any(not isinstance(part, Comparison) or part.op != "is_not" for part in parts)


def _where(condition: Condition, parameters: tuple[str, ...]) -> str:
    match condition:
        case Comparison():
            return _test(condition, parameters)
        case AllOf():
            return "(" + (" AND ".join(_where(part, parameters) for part in condition.parts) or "1") + ")"
        case AnyOf():
            return "(" + (" OR ".join(_where(part, parameters) for part in condition.parts) or "0") + ")"


def _test(test: Comparison, parameters: tuple[str, ...]) -> str:
    column = ident(test.column)
    values = [_value(operand, parameters) for operand in test.operands]
    if test.op in ("between", "not_between"):
        return f"{column} {'NOT ' if test.op == 'not_between' else ''}BETWEEN {values[0]} AND {values[1]}"
    if test.op in ("in", "not_in"):
        return f"{column} {'NOT ' if test.op == 'not_in' else ''}IN ({', '.join(values)})"
    return f"{column} {_SIGNS[test.op]} {values[0]}"


def _value(operand: Operand, parameters: tuple[str, ...]) -> str:
    if isinstance(operand, Param):
        return f"?{parameters.index(operand.name) + 1}"
    return constant(to_stored(operand.value))


# --- the first rows of an order -------------------------------------------------------------------------------


def _top_guard(push: Pushdown, query: tree.Query, ordered: Ordered, parameters: tuple[str, ...]) -> TopGuard | None:
    if not ordered.is_total or len(query.selects) > 1 or query.limit is None or push.top is None:
        return None
    select = query.selects[0]
    nature = SelectKind(select, query.order)
    source = select.source
    if nature.keeps_all or nature.has_windows or not isinstance(source, tree.Source) or source.table is None:
        return None
    rows = _rows(query.limit, parameters)
    if rows is None:
        return None
    order, last = [], []
    for term in query.order:
        of = select.outputs[term.output].of if term.output is not None else term.of
        place = place_of(of, select)
        if not isinstance(of, tree.Ref) or of.source is not source or place is None or term.nulls:
            return None
        order.append((str(of.column), term.descends))
        last.append(place)
    return TopGuard(push.top.occurrences[id(source)].number, tuple(order), tuple(last), rows)


def _rows(node: object, parameters: tuple[str, ...]) -> Operand | None:
    if isinstance(node, tree.Literal) and node.text.isdecimal() and int(node.text) > 0:
        return Const(int(node.text))
    return Param(parameters[node.slot - 1]) if isinstance(node, tree.Bind) else None
