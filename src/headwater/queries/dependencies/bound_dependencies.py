"""The dependencies of a query bound to its arguments, which decide whether a change is relevant to the instance."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from weakref import WeakKeyDictionary, ref

import msgspec

from headwater.model.bounded_cache import BoundedCache
from headwater.model.change import Change
from headwater.model.dependencies.dependency import (
    AllOf,
    Analysis,
    AnyOf,
    Comparison,
    Condition,
    Dependency,
    Operand,
    Param,
)
from headwater.model.literal import Value
from headwater.model.table import Table
from headwater.queries.dependencies.column_bytes import Shape, shapes_of
from headwater.queries.dependencies.intervals import EVERYTHING, NOTHING, Spans, union, where_true
from headwater.queries.dependencies.template import (
    POINT,
    POINTS,
    SPANS,
    Conjunction,
    Disjunction,
    Held,
    Leaf,
    Template,
    Tree,
    Values,
    leaves,
)
from headwater.sources.query import Queryable

MAX_TEMPLATES = 10_000
MAX_TEMPLATE_LEAVES = 200_000  # of all cached templates together; a column of a table counts as one
MAX_LEAVES = 1_000  # a condition with more is dropped: then every row of the table is relevant
MAX_DEPTH = 40
# Types whose values every database compares unconverted with a column declared so: asking the source is the slow part.
_AS_IS = {"INTEGER": int, "INT": int, "BIGINT": int, "TEXT": str}
_WHOLE = 2.0**53  # from here on a float does not represent every integer


class TableReference(msgspec.Struct, frozen=True):
    """One reference to a table in an instance."""

    template: Template
    values: Values

    def matters(self, change: Change) -> bool:
        """Return whether `change`, of the same table, may affect the rows that this reference reads."""
        return self.template.matters(change, self.values)


class BoundDependencies(msgspec.Struct, frozen=True):
    """The dependencies of one instance."""

    references: tuple[TableReference, ...]

    def matters(self, change: Change) -> int | None:
        """Return the index in `Analysis.dependencies` of the first one that `change` affects; None if there is none."""
        name = change.table.name
        for number, reference in enumerate(self.references):
            if reference.template.table == name and reference.matters(change):
                return number
        return None


def bind(
    source: Queryable, tables: Mapping[str, Table], analysis: Analysis, args: Mapping[str, Value]
) -> BoundDependencies:
    """Return the dependencies of `analysis` with these arguments; `tables` are the tables it was made for.

    A part of a condition that cannot be encoded (an operand that the column rejects, an unknown collation) is
    dropped: then more rows are relevant.
    """
    binder = _BINDERS.get(source) or _BINDERS.setdefault(source, _Binder(source))
    return BoundDependencies(tuple(binder.bind(each, tables.get(each.table), args) for each in analysis.dependencies))


# --- trees with values -----------------------------------------------------------------------------------


class _BoundLeaf(msgspec.Struct, frozen=True):
    """A leaf with the bytes that its column must hold."""

    column: str
    held: Held


class _Conjunction(msgspec.Struct, frozen=True):
    parts: tuple[_Tree, ...]


class _Disjunction(msgspec.Struct, frozen=True):
    parts: tuple[_Tree, ...]


_Tree = _BoundLeaf | _Conjunction | _Disjunction | bool


def _spans(held: Held) -> Spans:
    if isinstance(held, Spans):
        return held
    return Spans.of([held] if isinstance(held, bytes) else held)


def _holding(column: str, spans: Spans) -> _Tree:
    """Return the simplest tree for `spans` in `column`: most tests compare with one value."""
    if spans in (NOTHING, EVERYTHING):
        return spans == EVERYTHING
    points = spans.points
    if points is None:
        return _BoundLeaf(column, spans)
    return _BoundLeaf(column, next(iter(points)) if len(points) == 1 else points)


def _joined(parts: Iterable[_Tree], kind: type[_Conjunction] | type[_Disjunction]) -> _Tree:
    """Return the conjunction (or disjunction) of `parts`: flat, without constants, with one leaf per column."""
    decisive = kind is _Disjunction  # a part with this constant value decides the result
    held: dict[str, Spans] = {}
    rest: list[_Tree] = []
    alone: dict[str, _Tree] = {}  # the only leaf of a column is left unchanged
    for part in _flat(parts, kind):
        if isinstance(part, bool):
            if part is decisive:
                return decisive
        elif not isinstance(part, _BoundLeaf):
            rest.append(part)
        elif part.column in held or part.column in alone:
            first = alone.pop(part.column, None)
            both = [_spans(first.held) if isinstance(first, _BoundLeaf) else held[part.column], _spans(part.held)]
            held[part.column] = union(both) if decisive else both[0].intersect(both[1])
        else:
            alone[part.column] = part
    merged = [_holding(column, spans) for column, spans in held.items()]
    if any(part is decisive for part in merged):
        return decisive
    found = [*alone.values(), *(part for part in merged if not isinstance(part, bool)), *rest]
    if len(found) < 2:
        return found[0] if found else not decisive
    return kind(tuple(found))


def _flat(parts: Iterable[_Tree], kind: type[_Conjunction] | type[_Disjunction]) -> Iterable[_Tree]:
    for part in parts:
        if isinstance(part, kind):
            yield from part.parts
        else:
            yield part


def _taken_apart(tree: _Tree, values: list[Held]) -> Tree:
    """Return the tree with slots in place of its values, and append the values to `values`."""
    if isinstance(tree, bool):
        return tree
    if isinstance(tree, _BoundLeaf):
        values.append(tree.held)
        kind = POINT if isinstance(tree.held, bytes) else SPANS if isinstance(tree.held, Spans) else POINTS
        return Leaf(tree.column, kind, len(values) - 1)
    parts = tuple(_taken_apart(part, values) for part in tree.parts)
    return (Conjunction if isinstance(tree, _Conjunction) else Disjunction)(parts)  # type: ignore[arg-type]


# --- one source ------------------------------------------------------------------------------------------


def _known(cell: bytes | None) -> bytes:
    if cell is None:
        raise ValueError("the value has no encoding in this column")
    return cell


class _Binder:
    """Binds for one source. Thread-safe: templates that two threads make concurrently are equal."""

    def __init__(self, source: Queryable) -> None:
        self._source = ref(source)  # weak, because the source is the weak key under which this binder is cached
        self._shapes = shapes_of(source)
        self._templates: BoundedCache[Hashable, Template] = BoundedCache(MAX_TEMPLATES, MAX_TEMPLATE_LEAVES)

    def bind(self, dependency: Dependency, table: Table | None, args: Mapping[str, Value]) -> TableReference:
        """Return one dependency bound to its arguments, without the parts of its condition that cannot be encoded."""
        values: list[Held] = []
        tree: Tree = True
        if table is not None:
            try:
                tree = _taken_apart(self._tree(dependency.condition, self._shapes.of(table), args, 0), values)
            except RecursionError:
                values = []
        if len(values) > MAX_LEAVES:
            tree, values = True, []
        return TableReference(self._template(dependency, table, tree), tuple(values))

    def _tree(self, condition: Condition, shape: Shape, args: Mapping[str, Value], depth: int) -> _Tree:
        if depth > MAX_DEPTH:
            return True
        match condition:
            case Comparison():
                return self._test(condition, shape, args)
            case AllOf(parts):
                return _joined((self._tree(part, shape, args, depth + 1) for part in parts), _Conjunction)
            case AnyOf(parts):
                return _joined((self._tree(part, shape, args, depth + 1) for part in parts), _Disjunction)

    def _test(self, test: Comparison, shape: Shape, args: Mapping[str, Value]) -> _Tree:
        try:
            encode = shape.encoder(shape.table.index[test.column])
            operands = [self._operand(each, test.column, shape, encode, args) for each in test.operands]
            if test.op == "eq" and operands[0] is not None:
                return _BoundLeaf(test.column, operands[0])
            null = encode(None)
            return True if null is None else _holding(test.column, where_true(test.op, operands, null))
        except Exception:  # without this test the condition is true for more rows, which is always safe
            return True

    def _operand(
        self,
        operand: Operand,
        column: str,
        shape: Shape,
        encode: Callable[[Value], bytes | None],
        args: Mapping[str, Value],
    ) -> bytes | None:
        """Return the bytes of an operand, None for NULL; raise if it cannot be encoded for the column."""
        given = args[operand.name] if isinstance(operand, Param) else operand.value
        if given is None:
            return None
        declared = shape.table.columns[shape.table.index[column]].declared
        if type(given) is _AS_IS.get(declared):
            return _known(encode(given))
        source = self._source()
        if source is None:
            raise ValueError("the source is closed")
        (held,) = source.stored(shape.table, (column,), (given,))
        if held is None:  # NaN
            return None
        if isinstance(held, float) and not isinstance(given, float) and abs(held) >= _WHOLE:
            raise ValueError("the column would round the operand; a comparison does not")
        return _known(encode(held))

    def _template(self, dependency: Dependency, table: Table | None, tree: Tree) -> Template:
        found_leaves = list(leaves(tree))
        names = dict.fromkeys(leaf.column for leaf in found_leaves)
        columns = () if table is None else tuple(table.columns[table.index[name]] for name in names)
        signature = (dependency.table, dependency.columns, tree, columns)
        found = self._templates.get(signature)
        if found is None:
            found = Template(self._shapes, dependency.table, dependency.columns, tree, columns)
            weight = 1 + len(found_leaves) + len(columns) + len(dependency.columns or ())
            self._templates.put(signature, found, weight)
        return found


_BINDERS: WeakKeyDictionary[object, _Binder] = WeakKeyDictionary()
