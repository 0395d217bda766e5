"""Columns that identify the rows of a SELECT: the keys of the joined sources, minus keys that others determine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headwater.model.table import Table
from headwater.sources.sqlite.query.affinity import affinity, doubt
from headwater.sources.sqlite.query.facts.conditions import conjuncts
from headwater.sources.sqlite.query.facts.facts import column_of, rule_of
from headwater.sources.sqlite.query.facts.select_kind import SelectKind
from headwater.sources.sqlite.query.syntax import tree
from headwater.sources.sqlite.query.syntax.render import expression

# The values of these functions are text, integers or NULL.
_TEXTS = (
    "count length typeof hex quote unicode instr lower upper substr substring trim ltrim rtrim replace printf format"
)
_EXACT_CALLS = frozenset(_TEXTS.split())
_IDENTITY_OF_JSON = 4  # position of the column `id` of json_each


def is_same(node: Any, other: Any) -> bool:
    """Return whether both are the same column, or expressions with the same text."""
    if isinstance(node, tree.Ref) and isinstance(other, tree.Ref) and node.source is not None:
        return node.source is other.source and node.column == other.column
    if node is other or type(node) is not type(other) or isinstance(node, tree.Literal | tree.Ref | None):
        return node is other
    return expression(node) == expression(other)


def place_of(node: Any, select: tree.Select) -> int | None:
    """Return the position of the output that is the same expression; None if there is none."""
    return next((place for place, output in enumerate(select.outputs) if is_same(output.of, node)), None)


def places_of(nodes: Sequence[Any], select: tree.Select) -> tuple[int, ...] | None:
    """Return the positions of the outputs that are these expressions; None if one of them is no output."""
    places = tuple(place for node in nodes if (place := place_of(node, select)) is not None)
    return places if len(places) == len(nodes) else None


def is_exact(node: Any) -> bool:
    """Return whether values of the expression that compare equal are always identical."""
    if isinstance(node, tree.Call):
        has_collation = any(isinstance(part, tree.Collate) for part in tree.below(node))
        return node.name.lower() in _EXACT_CALLS and not has_collation and node.over is None
    if isinstance(node, tree.Literal | tree.Bind):
        return True
    if not isinstance(node, tree.Ref) or node.source is None:
        return False
    if node.source.table is not None:
        return is_exact_column(node.source.table, str(node.column))
    query = node.source.query
    if node.source.kind not in ("query", "view", "with") or query is None or query.is_recursive:
        return False
    place = int(node.column)
    return all(select.values is None and is_exact(select.outputs[place].of) for select in query.selects)


def is_exact_column(table: Table, name: str) -> bool:
    """Return whether equal values of a column are always identical: 1 and 1.0 occur only without affinity."""
    column = column_of(table, name)
    if column is None or doubt(table, column) or column.collation != "BINARY":
        return False
    return affinity(column) != "BLOB"


def unique_key(table: Table) -> tuple[str, ...] | None:
    """Return the key if no two rows share it; None if it may hold NULLs, which SQLite lets repeat in most keys."""
    for name in table.key:
        column = column_of(table, name)
        if column is None or (column.nullable and not column.auto and not column.hidden):
            return None
    return table.key or None


class RowIdentity:
    """Row identity of one SELECT without DISTINCT and GROUP BY."""

    def __init__(self, select: tree.Select) -> None:
        self._sources = list(tree.sources(select.source))
        self._is_plain = all(join.kind in ("", "LEFT") for join in tree.joins(select.source))
        self._equals = list(_equalities(select)) if self._is_plain else []

    def columns(self) -> list[tree.Ref] | None:
        """Return columns that together identify a row; None if there are none."""
        keys = {id(source): _key(source) for source in self._sources}
        if any(key is None for key in keys.values()):
            return None
        kept: list[tree.Source] = []
        for source in self._sources:
            if not self._is_determined(keys[id(source)] or [], source, kept):
                kept.append(source)
        return [ref for source in kept for ref in keys[id(source)] or []]

    def has_one_row(self) -> bool:
        """Return whether there can be only one row: constants and outer columns determine all keys."""
        return self._is_plain and self.columns() == []

    def _is_determined(self, key: list[tree.Ref], source: tree.Source, known: list[tree.Source]) -> bool:
        """Return whether constants and the sources in `known` determine the row of `source`."""
        others = [one for one in self._sources if one not in known]
        return bool(key) and all(any(_determines(pair, ref, others) for pair in self._equals) for ref in key)


def _key(source: tree.Source) -> list[tree.Ref] | None:
    if source.table is not None:
        names = unique_key(source.table)
        return None if names is None else [tree.Ref(None, name, source=source, column=name) for name in names]
    if source.kind == "function":
        return [tree.Ref(None, "id", source=source, column=_IDENTITY_OF_JSON)]
    places = row_key(source.query) if source.query is not None and source.kind != "recursive" else None
    return None if places is None else [tree.Ref(None, "", source=source, column=place) for place in places]


def row_key(query: tree.Query) -> tuple[int, ...] | None:
    """Return the positions of output columns that identify the rows of a query; None if there are none."""
    if query.is_recursive:
        return None
    if len(query.selects) > 1:
        is_set = query.ops[-1] != "UNION ALL"
        return tuple(range(len(query.selects[0].outputs))) if is_set else None
    select = query.selects[0]
    nature = SelectKind(select, query.order)
    if select.values is not None or nature.is_one_row:
        return () if nature.is_one_row else None
    if nature.is_distinct:
        return tuple(range(len(select.outputs)))
    keys = nature.keys if nature.is_grouped else RowIdentity(select).columns()
    return None if keys is None else places_of(keys, select)


def _equalities(select: tree.Select) -> Iterator[tuple[Any, Any]]:
    """Yield columns with an expression they equal in every row; of an outer join only columns of its NULL side."""
    yield from _pairs(select.where, None)
    for join in tree.joins(select.source):
        made_up = None if not join.kind else list(tree.sources(join.right))
        yield from _pairs(join.on, made_up)
        for left, right in join.shared:
            yield from _pairs(tree.Binary("=", left, right), made_up)


def _pairs(root: Any, among: list[tree.Source] | None) -> Iterator[tuple[Any, Any]]:
    for part in conjuncts(root):
        if isinstance(part, tree.Binary) and part.op in ("=", "=="):
            for mine, value in ((part.left, part.right), (part.right, part.left)):
                if isinstance(mine, tree.Ref) and (among is None or any(mine.source is one for one in among)):
                    yield mine, value


def _determines(pair: tuple[Any, Any], ref: tree.Ref, others: list[tree.Source]) -> bool:
    mine, value = pair
    if not is_same(mine, ref):
        return False
    if isinstance(value, tree.Literal | tree.Bind):
        return rule_of(mine) is not None
    if not isinstance(value, tree.Ref) or value.source is None or any(value.source is other for other in others):
        return False
    kind, theirs = rule_of(mine), rule_of(value)
    return kind is not None and theirs is not None and kind.rule == theirs.rule
