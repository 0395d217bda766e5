"""Result order: whether two runs over the same rows give the same bytes, and the ORDER BY terms that ensure it."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.sources.sqlite.connection import ident
from headwater.sources.sqlite.query.determinism.stable_values import unsteady
from headwater.sources.sqlite.query.facts.row_identity import (
    RowIdentity,
    is_exact,
    is_same,
    place_of,
    places_of,
    row_key,
)
from headwater.sources.sqlite.query.facts.select_kind import SelectKind
from headwater.sources.sqlite.query.syntax import tree
from headwater.sources.sqlite.query.syntax.lexer import NotAnalysed

_NO_KEY = "its rows cannot be distinguished, so their order is undetermined"


class Ordered(msgspec.Struct, frozen=True):
    """The statement to run, and the known facts about the order of its result."""

    sql: str
    is_total: bool
    key: tuple[int, ...] | None
    added: list[tree.Term] = []
    doubts: tuple[str, ...] = ()


def in_order(query: tree.Query, sql: str) -> Ordered:
    """Return `sql` with a total order; if there is none, `sql` itself with the reason in `doubts`."""
    if (reason := unsteady(query)) is not None:
        return Ordered(sql, False, None, doubts=(f"every column counts: {reason}",))
    found = _terms(query)
    if found is None:
        return Ordered(sql, False, None, doubts=(f"every column counts: {_NO_KEY}",))
    added, key = found
    return Ordered(_with_terms(query, sql, added), True, key, added)


def _with_terms(query: tree.Query, sql: str, added: list[tree.Term]) -> str:
    if not added:
        return sql
    text = ", ".join(map(_text, added))
    if query.order:
        place = query.order[-1].end
        return f"{sql[:place]}, {text}{sql[place:]}"
    return f"{sql[: query.body_end]} ORDER BY {text}{sql[query.body_end :]}"


def _text(term: tree.Term) -> str:
    if term.output is not None:
        return str(term.output + 1)
    source, ref = term.of.source, term.of
    name = ref.column if isinstance(ref.column, str) else source.columns[ref.column]
    if name is None:
        raise NotAnalysed("a key column has no name")
    return f"{ident(source.alias or source.name)}.{ident(name)}"


def _terms(query: tree.Query) -> tuple[list[tree.Term], tuple[int, ...] | None] | None:
    """Return the terms that make ORDER BY total, and the key's positions in the result; None if there are none."""
    if len(query.selects) > 1:
        return _by_outputs(query)
    select = query.selects[0]
    nature = SelectKind(select, query.order)
    if select.values is not None:
        return ([], None) if len(select.values) == 1 else None
    if nature.is_one_row:
        return [], None
    if nature.is_grouped:
        return None if nature.is_distinct else _by_refs(query, select, nature.keys)
    if nature.is_distinct:
        return _by_outputs(query)
    identity = RowIdentity(select).columns()
    found = _by_refs(query, select, list(identity)) if identity is not None else None
    return found if found is not None else _by_outputs(query)


def _by_refs(query: tree.Query, select: tree.Select, keys: list[Any]) -> tuple[list[tree.Term], Any] | None:
    added = []
    for key in keys:
        if any(_covers(term, select, key) for term in query.order):
            continue
        place = place_of(key, select)
        is_named = isinstance(key, tree.Ref) and key.source is not None and (key.source.alias or key.source.name)
        if place is None and not is_named:
            return None
        added.append(tree.Term(key, output=place))
    return added, places_of(keys, select) or None


def _covers(term: tree.Term, select: tree.Select, key: Any) -> bool:
    of = select.outputs[term.output].of if term.output is not None else term.of
    return is_same(of, key)


def _is_shown(term: tree.Term, select: tree.Select) -> bool:
    return term.output is not None or place_of(term.of, select) is not None


def _by_outputs(query: tree.Query) -> tuple[list[tree.Term], tuple[int, ...] | None] | None:
    """Return terms for all output columns: rows that are equal in all of them are identical bytes."""
    first = query.selects[0]
    if len(query.selects) == 1 and first.distinct and not all(_is_shown(term, first) for term in query.order):
        return None  # DISTINCT merges rows, and the position of the merged row may come from any of them
    for select in query.selects:
        if select.values is not None or not all(is_exact(output.of) for output in select.outputs):
            return None
    taken = {term.output for term in query.order}
    added = [tree.Term(None, output=place) for place in range(len(first.outputs)) if place not in taken]
    return added, row_key(query)
