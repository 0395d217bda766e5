"""Detailed analysis of one SELECT: its tree, the tables in it with their columns and conditions, its order."""

from __future__ import annotations

import msgspec

from headwater.errors import HeadwaterError
from headwater.model.dependencies.dependency import Dependency, Guard, columns_of
from headwater.sources.sqlite.database_file import GuardedConnection
from headwater.sources.sqlite.query.analysis.authorizer_reads import StatementFacts, facts_of
from headwater.sources.sqlite.query.analysis.guards import guards_of
from headwater.sources.sqlite.query.analysis.parser_check import real, verify
from headwater.sources.sqlite.query.determinism.failing_functions import failing, may_fail
from headwater.sources.sqlite.query.determinism.result_order import Ordered, in_order
from headwater.sources.sqlite.query.determinism.stable_values import queries_of
from headwater.sources.sqlite.query.facts.facts import Instance, condition_of
from headwater.sources.sqlite.query.facts.predicate_pushdown import Pushdown, Requirements
from headwater.sources.sqlite.query.syntax.lexer import NotAnalysed
from headwater.sources.sqlite.query.syntax.name_resolution import Names
from headwater.sources.sqlite.query.syntax.parser import parse


class SelectAnalysis(msgspec.Struct, frozen=True):
    """Result of the detailed analysis; for the fields see Analysis."""

    sql: str
    dependencies: tuple[Dependency, ...]
    is_total: bool
    key: tuple[int, ...] | None
    guards: tuple[Guard, ...]
    doubts: tuple[str, ...]


def analyse_select(reader: GuardedConnection, sql: str, facts: StatementFacts) -> SelectAnalysis:
    """Analyse `sql` with our parser; raise NotAnalysed or another error if that fails or the engine disagrees."""
    query = parse(sql)
    # Only objects that the engine reads are resolved: SQLite drops `0 AND EXISTS (…)` before it resolves names, so no
    # scope was checked for a table in it, and a hidden table must give the same result as a missing table.
    views = set(facts.views)
    names = Names(
        {name: table for name, table in reader.catalog.tables().items() if name in facts.tables},
        {name: text for name, text in reader.guard.views().items() if name in views},
    )
    names.query(query)
    verify(reader, query, names, facts)
    ordered = _checked(reader, in_order(query, sql), sql, facts, {table for table, _ in names.read})
    query.order.extend(ordered.added)  # the result depends on these columns, too
    push = Pushdown(facts.parameters, lambda text: real(reader, text))
    push.query(query, Requirements())
    found = tuple(_dependency(place, ordered.is_total) for place in push.places)
    if (name := failing(query)) is not None:
        # An inner query may evaluate a column that nothing needs.
        is_single = len(list(queries_of(query))) == 1
        whole = tuple(Dependency(place.table, place.columns if is_single else None) for place in found)
        doubts = (*ordered.doubts, f"{name} may fail on any row")
        return SelectAnalysis(ordered.sql, whole, ordered.is_total, ordered.key, (), doubts)
    guards = () if may_fail(facts.functions) else guards_of(push, query, ordered, found, facts.parameters)
    return SelectAnalysis(ordered.sql, found, ordered.is_total, ordered.key, guards, ordered.doubts)


def _checked(reader: GuardedConnection, ordered: Ordered, sql: str, facts: StatementFacts, tables: set[str]) -> Ordered:
    """Return `ordered` if the engine confirms that its text is still the same query."""
    if ordered.sql == sql:
        return ordered
    try:
        again = facts_of(reader, ordered.sql)
    except HeadwaterError:
        return Ordered(sql, False, None, doubts=("every column counts: its order could not be made total",))
    old, new = facts.statement, again.statement
    if (old.columns, old.parameters) != (new.columns, new.parameters) or set(again.tables) - tables:
        raise NotAnalysed("the statement has an ORDER BY of its own")
    return ordered


def _dependency(place: Instance, is_total: bool) -> Dependency:
    assert place.table is not None
    condition = condition_of(place.table, place.formulas)
    columns = frozenset(map(str, place.used)) | columns_of(condition)
    return Dependency(place.table.name, columns if is_total else None, condition)
