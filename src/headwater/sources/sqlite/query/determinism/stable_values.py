"""Check that the values of a result, apart from their order, are the same in every run over the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwater.sources.sqlite.query.facts.row_identity import RowIdentity, is_exact, is_same
from headwater.sources.sqlite.query.facts.select_kind import SelectKind
from headwater.sources.sqlite.query.syntax import tree
from headwater.sources.sqlite.query.syntax.name_resolution import is_aggregate

_RANKS = frozenset({"rank", "dense_rank", "percent_rank", "cume_dist", "count"})
_TESTS = frozenset(
    {"=", "==", "<>", "!=", "<", "<=", ">", ">=", "IS", "IS NOT", "LIKE", "NOT LIKE", "GLOB", "NOT GLOB"}
)


def unsteady(query: tree.Query) -> str | None:
    """Return why the values depend on the order in which SQLite reads rows; None if they do not."""
    for inner, use in queries_of(query):
        for reason in _reasons(inner, use):
            return reason
    return None


def queries_of(query: tree.Query) -> Iterator[tuple[tree.Query, str]]:
    """Yield the query and every inner query with its use: top, rows (FROM, IN), any (EXISTS), value."""
    stack, seen = [(query, "top")], set()
    while stack:
        found, use = stack.pop()
        if id(found) in seen and use != "value":
            continue
        seen.add(id(found))
        yield found, use
        parts = list(tree.parts_of(found))
        for select in found.selects:
            parts += [source.query for source in tree.sources(select.source) if source.kind in ("view", "with")]
        for part in parts:
            if isinstance(part, tree.Query):
                stack.append((part, "rows"))
                continue
            for node in tree.below(part):
                if isinstance(node, tree.Subquery):
                    stack.append((node.query, "any" if node.exists else "value"))
                elif isinstance(node, tree.In) and node.query is not None:
                    stack.append((node.query, "rows"))


def _reasons(query: tree.Query, use: str) -> Iterator[str]:
    if use in ("rows", "value") and query.limit is not None and not _is_ordered(query):
        yield "an inner LIMIT takes any of several rows"
    if use == "value" and not _has_one_row(query) and not (query.limit is not None and _is_ordered(query)):
        yield "a subquery may find several rows and takes any of them"
    is_set = any(op != "UNION ALL" for op in query.ops)
    for select in query.selects:
        if (is_set or select.distinct) and not all(is_exact(output.of) for output in select.outputs):
            yield "any of several equal values may be shown"
        yield from _of_select(select, query.order if len(query.selects) == 1 else [])


def _has_one_row(query: tree.Query) -> bool:
    if len(query.selects) > 1:
        return False
    select = query.selects[0]
    nature = SelectKind(select, query.order)
    if select.values is not None:
        return len(select.values) == 1
    return nature.is_one_row or (not nature.is_grouped and RowIdentity(select).has_one_row())


def _is_ordered(query: tree.Query) -> bool:
    """Return whether ORDER BY includes a key of the rows."""
    if len(query.selects) > 1 or query.is_recursive:
        return False
    if _has_one_row(query):
        return True
    select = query.selects[0]
    nature = SelectKind(select, query.order)
    if select.values is not None or nature.is_distinct:
        return False
    keys = nature.keys if nature.is_grouped else RowIdentity(select).columns()
    terms = [select.outputs[term.output].of if term.output is not None else term.of for term in query.order]
    return keys is not None and all(any(is_same(term, key) for term in terms) for key in keys)


def _of_select(select: tree.Select, order: list[tree.Term]) -> Iterator[str]:
    nature = SelectKind(select, order)
    roots = [output.of for output in select.outputs] + [term.of for term in order if term.of is not None]
    roots += [select.having] if select.having is not None else []
    for node in (node for root in roots for node in tree.below(root)):
        if isinstance(node, tree.Call) and node.over is not None:
            over = node.over
            if node.name.lower() not in _RANKS or isinstance(over, str) or over.frame or over.base:
                yield f"{node.name}() over a window depends on the order of equal rows"
        elif is_aggregate(node) and not _is_steady(node):
            yield f"{node.name}() depends on the order of its rows"
    if nature.is_grouped or nature.is_one_row:
        yield from _of_groups(roots, nature.keys, select)


def _is_steady(call: tree.Call) -> bool:
    name = call.name.lower()
    if name in ("min", "max"):
        return is_exact((call.args or [None])[0])
    if name == "count":
        return True
    if name in ("sum", "total", "avg"):
        return is_integer((call.args or [None])[0])
    return False  # the function depends on row order, or was never checked


def _of_groups(roots: list[Any], keys: list[Any], select: tree.Select) -> Iterator[str]:
    own = set(map(id, tree.sources(select.source)))
    for root in roots:
        stack = [root]
        while stack:
            node = stack.pop()
            key = next((key for key in keys if is_same(node, key)), None)
            if key is not None and not isinstance(key, tree.Ref):
                continue
            if isinstance(node, tree.Ref) and node.stands_for is None and id(node.source) in own:
                if key is None:
                    yield f"{node.name} is taken from any row of a group"
                elif not is_exact(node):
                    yield f"any of several equal values of {node.name} may be shown"
            if is_aggregate(node):
                continue
            if isinstance(node, tree.Query):
                yield from _of_correlated(node, keys, own)
            else:
                stack.extend(tree.children(node))


def _of_correlated(query: tree.Query, keys: list[Any], own: set[int]) -> Iterator[str]:
    for ref in tree.names_in(query):
        if id(ref.source) in own and not (is_exact(ref) and any(is_same(ref, key) for key in keys)):
            yield f"{ref.name} is taken from any row of a group"


def is_integer(node: Any) -> bool:
    """Return whether a value is always an integer or NULL: sums of floats depend on their order."""
    match node:
        case tree.Literal():
            return node.text == "NULL" or node.text.isdecimal()
        case tree.Ref() if node.source is not None and node.source.table is not None:
            column = node.source.table.columns[node.source.table.index[str(node.column)]]
            return bool(column.auto or column.hidden)
        case tree.Case():
            values = [then for _, then in node.whens] + ([node.otherwise] if node.otherwise is not None else [])
            return all(map(is_integer, values))
        case tree.Binary():
            return node.op in _TESTS
        case tree.Between() | tree.In() | tree.Null():
            return True
        case tree.Call():
            return node.name.lower() in ("count", "length", "unicode", "instr")
    return False
