"""Kind of a SELECT (grouped, distinct, windowed): it decides whether a condition on the output restricts the input."""

from __future__ import annotations

from typing import Any

from headwater.sources.sqlite.query.facts.facts import rule_of
from headwater.sources.sqlite.query.syntax import tree
from headwater.sources.sqlite.query.syntax.name_resolution import is_aggregate


class SelectKind:
    """Kind of a SELECT: grouped, distinct, aggregated to one row, with windows."""

    def __init__(self, select: tree.Select, order: list[tree.Term]) -> None:
        roots = [output.of for output in select.outputs] + [term.of for term in order]
        roots += [select.having] if select.having is not None else []
        roots += [part for _, window in select.windows for part in tree.inside(window)]
        nodes = [node for root in roots for node in tree.below(root)]
        self.has_windows = any(isinstance(node, tree.Call) and node.over is not None for node in nodes)
        self.is_grouped = bool(select.group)
        self.is_distinct = select.distinct
        aggregates = any(map(is_aggregate, nodes)) or select.having is not None
        self.is_one_row = aggregates and not self.is_grouped
        self.keys = [by_number(key, select) for key in select.group]

    def lets_through(self, ref: tree.Ref) -> bool:
        """Return whether a condition on this output column also restricts the input rows."""
        if self.is_one_row or self.has_windows:
            return False
        keys = [(key.source, key.column) for key in self.keys if isinstance(key, tree.Ref)]
        if self.is_grouped and (ref.source, ref.column) not in keys:
            return False
        kind = rule_of(ref)
        return kind is not None and (kind[1] == "BINARY" or not (self.is_grouped or self.is_distinct))

    @property
    def keeps_all(self) -> bool:
        """Return whether every output column affects which rows appear, so that none may be left out."""
        return self.is_distinct or self.is_grouped or self.is_one_row


def by_number(key: Any, select: tree.Select) -> Any:
    """Return a term of GROUP BY with its number or alias resolved."""
    if isinstance(key, tree.Literal) and key.text.isdecimal() and 1 <= int(key.text) <= len(select.outputs):
        return select.outputs[int(key.text) - 1].of
    return key.stands_for if isinstance(key, tree.Ref) and key.stands_for is not None else key
