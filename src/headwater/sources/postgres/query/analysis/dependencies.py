"""Dependencies from facts: columns and conditions where the answer is determined, and the total order of a query."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.model.dependencies.dependency import ALWAYS, Condition, Dependency, columns_of
from headwater.sources.postgres.query.analysis.parse_tree import Node
from headwater.sources.postgres.query.analysis.parse_tree_source import Relation, StatementFacts
from headwater.sources.postgres.query.analysis.result_order import CatalogFacts, keys_of
from headwater.sources.postgres.query.analysis.row_conditions import Conditions
from headwater.sources.postgres.query.analysis.tree_reads import WHOLE_ROW
from headwater.sources.postgres.schema.table_shapes import ident

_SAME = ("jointree", "cteList", "windowClause", "hasSubLinks")


def dependencies(facts: StatementFacts, conditions: Conditions, *, is_total: bool) -> tuple[Dependency, ...]:
    """Return the dependencies on each table. Unless the order is total, an update of any column may move a row."""
    found: dict[str, tuple[set[str] | None, Condition]] = {}
    for oid, numbers in sorted(facts.used.columns.items()):
        relation = facts.relations[oid]
        if relation.kind == "v":
            continue
        columns = None if WHOLE_ROW in numbers or not is_total else {relation.columns[n] for n in numbers if n > 0}
        condition = conditions.of(oid)
        for table in _tables(facts, relation):
            if table.called not in found:
                found[table.called] = columns, condition
            else:  # a child that is also named occurs in several places, which have no common condition
                others, _ = found[table.called]
                found[table.called] = None if columns is None or others is None else columns | others, ALWAYS
    return tuple(
        Dependency(name, None if columns is None else frozenset(columns | columns_of(condition)), condition)
        for name, (columns, condition) in sorted(found.items())
    )


def _tables(facts: StatementFacts, relation: Relation) -> list[Relation]:
    """Return the tables that hold the rows: the relation itself, or its partitions and children."""
    children = facts.children.get(relation.oid, []) if relation.oid in facts.used.heirs else []
    every = [relation, *(facts.relations[oid] for oid in children)]
    return [each for each in every if each.kind != "p"]


def in_order(sql: str, query: Node, columns: dict[int, dict[int, str]], known: CatalogFacts) -> str | None:
    """Return the statement with its tables' keys added to ORDER BY, for another analysis; None without keys."""
    cells = keys_of(query, known)
    if not cells:
        return None
    entries = query.items("rtable")
    names = []
    for place, number in cells:
        entry = entries[place - 1]
        names.append(f"{ident(entry['eref']['aliasname'])}.{ident(columns[entry.number('relid')][number])}")
    word = "," if query["sortClause"] is not None else "ORDER BY"
    return f"{sql.rstrip().rstrip(';')}\n{word} {', '.join(names)}"


def differs_only_in_order(before: StatementFacts, after: StatementFacts) -> bool:
    """Return whether two statements differ only in their order."""
    one, other = before.query, after.query
    outputs = [
        [each["expr"] for each in query.items("targetList") if not each.is_true("resjunk")] for query in (one, other)
    ]
    if outputs[0] != outputs[1] or any(one[name] != other[name] for name in _SAME):
        return False
    return _sources(one.items("rtable")) == _sources(other.items("rtable")) and before.trees[1:] == after.trees[1:]


def _sources(entries: Sequence[Node]) -> list[object]:
    return [
        [entry.fields.get(name) for name in ("rtekind", "relid", "inh", "subquery", "functions")] for entry in entries
    ]
