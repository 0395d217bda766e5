"""Functions that fail on some values. SQLite may evaluate them on rows that no condition selects, and fail there.

SQLite guarantees no order among the parts of WHERE: with `json_extract(a, '$.x') = 1 AND b = 1` any malformed row may
fail. So where such a function selects rows, every row matters. Only JSON functions count: malformed JSON is common.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwater.sources.sqlite.query.determinism.stable_values import queries_of
from headwater.sources.sqlite.query.syntax import tree

_CAREFUL = frozenset({"json_valid", "json_error_position"})  # these report malformed JSON instead of failing


def failing(query: tree.Query) -> str | None:
    """Return the name of a function that may fail on rows outside the result; None if there is none.

    Columns, groups and order of the top-level query are evaluated only on rows of the result.
    """
    for found, use in queries_of(query):
        for select in found.selects:
            for root in _deciding(found, select, is_top=use == "top"):
                for node in tree.below(root):
                    if (name := _strict(node)) is not None:
                        return name
    return None


def _deciding(query: tree.Query, select: tree.Select, *, is_top: bool) -> Iterator[Any]:
    """Yield the expressions of a SELECT that may be evaluated before all its conditions."""
    if not is_top or select.having is not None:
        yield from tree.of_select(select)
        yield from (term.of for term in query.order if term.of is not None)
    yield from (part for part in (select.where, *(join.on for join in tree.joins(select.source))) if part is not None)
    sources = list(tree.sources(select.source))
    calls = [source for source in sources if source.kind == "function"]
    if not is_top or len(sources) - len(calls) > 1:  # with a single table all conditions are evaluated first
        yield from (tree.Call(source.name or "", source.args) for source in calls)


def _strict(node: Any) -> str | None:
    name = node.name if isinstance(node, tree.Call) else node.op if isinstance(node, tree.Binary) else ""
    return name if may_fail(name.lower()) and any(tree.names_in(node)) else None


def may_fail(name: str) -> bool:
    """Return whether the function may fail on some row."""
    return name in ("->", "->>") or (name.startswith("json") and name not in _CAREFUL)
