"""Detailed analysis of one SELECT: its tree, the tables in it with their columns and conditions, its order."""

from __future__ import annotations

import msgspec

from headwater.errors import HeadwaterError
from headwater.model.dependencies.dependency import Analysis, Dependency, Guard, columns_of
from headwater.sources.sqlite.database_file import GuardedConnection
from headwater.sources.sqlite.query.analysis.authorizer_reads import StatementFacts, facts_of, volatility
from headwater.sources.sqlite.query.analysis.guards import guards_of
from headwater.sources.sqlite.query.analysis.parser_check import real, verify
from headwater.sources.sqlite.query.determinism.failing_functions import failing, may_fail
from headwater.sources.sqlite.query.determinism.result_order import Ordered, in_order
from headwater.sources.sqlite.query.determinism.stable_values import queries_of
from headwater.sources.sqlite.query.facts.facts import Occurrence, condition_of
from headwater.sources.sqlite.query.facts.predicate_pushdown import Pushdown, Requirements
from headwater.sources.sqlite.query.syntax import tree
from headwater.sources.sqlite.query.syntax.lexer import NotAnalysed, folded
from headwater.sources.sqlite.query.syntax.name_resolution import Names
from headwater.sources.sqlite.query.syntax.parser import parse


def analyse_select(reader: GuardedConnection, whole: Analysis, facts: StatementFacts) -> Analysis:
    """Return `whole`, in which every row of the tables counts, as narrowed by our parser.

    Raise NotAnalysed or another error if that fails or the engine disagrees.
    """
    query = parse(whole.sql)
    names = _names(reader, query, facts)
    verify(reader, query, names, facts)
    ordered = _checked(reader, in_order(query, whole.sql), whole.sql, facts, {table for table, _ in names.read})
    query.order.extend(ordered.added)  # the result depends on these columns, too
    push = Pushdown(facts.parameters, lambda text: real(reader, text))
    push.query(query, Requirements())
    found = tuple(_dependency(each, ordered.is_total) for each in push.occurrences)
    guards: tuple[Guard, ...] = ()
    doubts = ordered.doubts
    if (name := failing(query)) is not None:
        # An inner query may evaluate a column that nothing needs.
        is_single = len(list(queries_of(query))) == 1
        found = tuple(Dependency(each.table, each.columns if is_single else None) for each in found)
        doubts = (*doubts, f"{name} may fail on any row")
    elif not any(map(may_fail, facts.functions)):
        guards = guards_of(push, query, ordered, found, facts.parameters)
    seen = {dependency.table for dependency in found}
    if not seen.issubset(facts.tables):
        raise NotAnalysed("the query names a table or view that SQLite did not report as read")
    return msgspec.structs.replace(
        whole,
        sql=ordered.sql,
        dependencies=(*found, *(Dependency(name) for name in facts.tables if name not in seen)),
        is_total=ordered.is_total,
        # The parser found no rowid in the statement that is not captured, even if SQLite itself reads one.
        volatile=volatility(reader, facts),
        key=ordered.key,
        guards=guards,
        doubts=doubts,
    )


def without_names_of_with(reader: GuardedConnection, sql: str, facts: StatementFacts) -> StatementFacts:
    """Return `facts` without the tables and views that only share their name with a WITH of the statement."""
    if not facts.columnless or "with" not in sql.lower():
        return facts
    names = _names(reader, parse(sql), facts)
    stored = {table for table, _ in names.read} | {name for name in facts.views if folded(name) in names.views}
    others = facts.columnless - stored
    return msgspec.structs.replace(
        facts,
        tables=tuple(name for name in facts.tables if name not in others),
        views=tuple(name for name in facts.views if name not in others),
        columns=frozenset(read for read in facts.columns if read[0] not in others),
    )


def _names(reader: GuardedConnection, query: tree.Query, facts: StatementFacts) -> Names:
    """Return the names of the query, resolved in place.

    Only objects that the engine reads are resolved: SQLite drops `0 AND EXISTS (…)` before it resolves names, so no
    scope was checked for a table in it, and a hidden table must give the same result as a missing table.
    """
    names = Names(
        {name: table for name, table in reader.catalog.tables().items() if name in facts.tables},
        {name: text for name, text in reader.guard.views().items() if name in facts.views},
    )
    names.query(query)
    return names


def _checked(reader: GuardedConnection, ordered: Ordered, sql: str, facts: StatementFacts, tables: set[str]) -> Ordered:
    """Return `ordered` if the engine confirms that it is the same query; else `sql` with a doubt, or NotAnalysed."""
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


def _dependency(occurrence: Occurrence, is_total: bool) -> Dependency:
    assert occurrence.table is not None
    condition = condition_of(occurrence.table, occurrence.formulas)
    columns = frozenset(map(str, occurrence.used)) | columns_of(condition)
    return Dependency(occurrence.table.name, columns if is_total else None, condition)
