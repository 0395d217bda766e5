"""Templates: dependencies without the argument values, shared by all instances that differ only in these values.

A condition is a tree of leaves, each a column and a slot of the instance's values; a value is the bytes that the
column must hold, a set of them, or spans. A leaf is true if its column's bytes are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from headwater.model.change import Change, Op
from headwater.model.table import Column, Row, Table
from headwater.queries.dependencies.column_bytes import Shape, Shapes, View, Watched, difference
from headwater.queries.dependencies.intervals import Spans

Held = bytes | frozenset[bytes] | Spans  # the bytes that a column may hold
Values = tuple[Held, ...]
Holds = Callable[[View, Values], bool]
POINT, POINTS, SPANS = "point", "points", "spans"  # kinds of leaves, the most selective first
_RANK = {POINT: 0, POINTS: 1, SPANS: 2}
_EXPRESSION = {POINT: "c == K[{0}]", POINTS: "c in K[{0}]", SPANS: "K[{0}].contains(c)"}
MAX_FITS = 8


class Leaf(msgspec.Struct, frozen=True):
    """A test of one column against the value in `slot`."""

    column: str
    kind: str
    slot: int


class Conjunction(msgspec.Struct, frozen=True):
    """A condition that is true if every part is."""

    parts: tuple[Node, ...]


class Disjunction(msgspec.Struct, frozen=True):
    """A condition that is true if any part is."""

    parts: tuple[Node, ...]


Node = Leaf | Conjunction | Disjunction
Tree = Node | bool  # a condition that is always or never true has no leaves


class Path(msgspec.Struct, frozen=True):
    """Columns whose values in a row lead to the instances whose condition the row may fulfil."""

    kind: str
    columns: tuple[str, ...]
    slots: tuple[int, ...]


class CompiledTemplate(msgspec.Struct, frozen=True):
    """A template compiled for one version of its table: the compared columns and the condition."""

    shape: Shape
    watched: Watched
    mask: int  # all the bits of `watched`
    holds: Holds

    def touches(self, before: Row | None, after: Row | None, values: Values) -> bool:
        """Return whether an update, insert or delete of a row is relevant to the instance with these `values`."""
        if before is not None and after is not None and not difference(self.watched, before, after):
            return False
        rows = [row for row in (before, after) if row is not None]
        return any(self.holds(View(self.shape, row), values) for row in rows)


class Template:
    """One reference to a table in a query, without the values. Compared by identity; made by `bind`."""

    def __init__(
        self, shapes: Shapes, table: str, columns: frozenset[str] | None, tree: Tree, definitions: tuple[Column, ...]
    ) -> None:
        self.table = table
        self.columns = columns
        self.tree = tree
        self.definitions = definitions  # of the columns in `tree`, as of when the values were encoded
        self.paths = () if isinstance(tree, bool) else paths(tree)
        self._shapes = shapes
        self._fits: list[tuple[Table, CompiledTemplate | None]] = []  # the most recently used first

    def matters(self, change: Change, values: Values) -> bool:
        """Return whether `change` may be relevant; on any error it is."""
        try:
            return change.table.name == self.table and self._matters(change, values)
        except Exception:  # a change must never be missed
            return True

    def _matters(self, change: Change, values: Values) -> bool:
        if is_unclear(change):
            return True
        fit = self.fit(change.table)
        return fit is None or fit.touches(change.before, change.after, values)

    def fit(self, table: Table) -> CompiledTemplate | None:
        """Return the template compiled for `table`; None if its columns are missing there or defined differently."""
        fits = self._fits
        if fits and fits[0][0] is table:
            return fits[0][1]
        known = [fit for shape, fit in fits if shape == table]
        found = known[0] if known else self._fit(table)
        self._fits = [(table, found), *(each for each in fits if each[0] != table)][:MAX_FITS]
        return found

    def _fit(self, table: Table) -> CompiledTemplate | None:
        index = table.index
        names = table.names if self.columns is None else self.columns
        wanted = {*names, *(each.name for each in self.definitions)}
        if not wanted <= index.keys() or any(table.columns[index[each.name]] != each for each in self.definitions):
            return None
        places = {index[name] for name in wanted}
        watched = tuple((place, 1 << place) for place in sorted(places))
        return CompiledTemplate(
            self._shapes.of(table), watched, sum(bit for _, bit in watched), _compile(self.tree, table)
        )


# Whether a before and an after image are needed, by op: a list, because ops hash slowly. None: the op has no row.
_NEEDED: list[tuple[bool, bool] | None] = [None] * (max(Op) + 1)
_NEEDED[Op.INSERT], _NEEDED[Op.UPDATE], _NEEDED[Op.DELETE] = (False, True), (True, True), (True, False)


def is_unclear(change: Change) -> bool:
    """Return whether the changed rows are not known: a schema change, a truncate, or an image missing or malformed."""
    needed = _NEEDED[change.op]
    if needed is None:
        return True
    before, after, width = change.before, change.after, len(change.table.columns)
    if before is None or after is None:
        return (needed[0] and before is None) or (needed[1] and after is None) or len(before or after or ()) != width
    return len(before) != width or len(after) != width


def paths(node: Node) -> tuple[Path, ...]:
    """Return the most selective paths for `node`: every row that fulfils it is found by one of them."""
    if isinstance(node, Leaf):
        return (Path(node.kind, (node.column,), (node.slot,)),)
    if isinstance(node, Disjunction):
        return tuple(path for part in node.parts for path in paths(part))
    points = [part for part in node.parts if isinstance(part, Leaf) and part.kind == POINT]
    if points:
        return (Path(POINT, tuple(leaf.column for leaf in points), tuple(leaf.slot for leaf in points)),)
    return min((paths(part) for part in node.parts), key=lambda ways: (max(_RANK[w.kind] for w in ways), len(ways)))


def leaves(tree: Tree) -> Iterator[Leaf]:
    """Yield every leaf, by slot."""
    if isinstance(tree, Leaf):
        yield tree
    elif isinstance(tree, Conjunction | Disjunction):
        for part in tree.parts:
            yield from leaves(part)


def _compile(tree: Tree, table: Table) -> Holds:
    """Return the condition as a function of a row and the values, so that it serves every instance."""
    made: Any = eval(f"lambda v, K: {_source(tree, table)}", {"__builtins__": {}})
    return made  # type: ignore[no-any-return]


def _source(tree: Tree, table: Table) -> str:
    if isinstance(tree, bool):
        return repr(tree)
    if isinstance(tree, Leaf):
        test = _EXPRESSION[tree.kind].format(tree.slot)
        return f"((c := v[{table.index[tree.column]}]) is None or {test})"
    word = " and " if isinstance(tree, Conjunction) else " or "
    return f"({word.join(_source(part, table) for part in tree.parts)})"
