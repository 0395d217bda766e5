"""The rows of its tables that a statement can read: conditions of its WHERE that Python can evaluate exactly.

A conjunct that compares a column with a constant or a parameter is true of every relevant row: a row for which it is
not true is in no row of the answer, and a row that an outer join fills in has NULL there, which is not true either.
This holds only for tables that occur once in the statement, and only if no condition can fail: PostgreSQL may evaluate
them in any order.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Mapping
from uuid import UUID

import msgspec

from headwater.model.dependencies.dependency import ALWAYS, AllOf, AnyOf, Comparison, Condition, Const, Operand, Param
from headwater.model.literal import Date, DateTime, Value
from headwater.sources.postgres.query.analysis.parse_tree import Item, Node, UnsupportedTree, below
from headwater.sources.postgres.query.analysis.parse_tree_source import StatementFacts
from headwater.sources.postgres.query.analysis.tree_reads import FUNCTION, RELATION
from headwater.sources.postgres.types import BOOL, DATE, INT2, INT4, INT8, TEXT, TIMESTAMP, TIMESTAMPTZ, UUID_, VARCHAR

INTS = frozenset({INT2, INT4, INT8})
_ORDERED = INTS | {DATE, TIMESTAMP, TIMESTAMPTZ}
_EQUAL = _ORDERED | {BOOL, UUID_, TEXT}
_TURNED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_STEADY = frozenset({"BOOLEXPR", "OPEXPR", "SCALARARRAYOPEXPR", "NULLTEST", "ARRAYEXPR", "ARRAY"})
_LEAVES = frozenset({"VAR", "CONST", "PARAM", "RELABELTYPE"})
# Casts that cannot fail: integers to wider integers, to floats and to numeric; real to double precision.
_WIDENING = frozenset({481, 754, 313, 235, 316, 482, 1740, 1781, 1782, 311})
_EPOCH = datetime.datetime(2000, 1, 1)
INNER = "0"


class Operator(msgspec.Struct, frozen=True):
    """A built-in comparison operator, which never fails: its name here and the types of its operands."""

    op: str
    left: int
    right: int


class UnknownCondition(Exception):
    """A condition with no known meaning for a single column."""


class Conditions:
    """The conditions of a statement. `operators` are the built-in comparisons by oid, `odd` the collations that treat
    different texts as equal, `names` the names of the parameters."""

    def __init__(
        self, facts: StatementFacts, names: tuple[str, ...], operators: Mapping[int, Operator], odd: set[int]
    ) -> None:
        self._query, self.names, self._relations, self._counts = facts.query, names, facts.relations, facts.used.counts
        self.operators, self.odd, self.is_little = operators, odd, facts.is_little
        self.is_plain = all(join["jointype"] == INNER for join in joins(facts.query))

    def of(self, oid: int) -> Condition:
        """Return a condition that is true of every relevant row of a table; ALWAYS if none is known."""
        parts: list[Condition] = []
        try:
            place, quals = self._place(oid), self._quals()
            for qual in quals:
                with contextlib.suppress(UnknownCondition):
                    parts.append(_TableConditions(self, place, self._relations[oid].columns).condition(qual))
        except (UnknownCondition, UnsupportedTree):
            return ALWAYS
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _place(self, oid: int) -> int:
        """Return the number of the table in FROM; UnknownCondition unless it occurs once, in no subquery or view."""
        own = [n for n, entry in enumerate(self._query.items("rtable"), 1) if _relation(entry) == oid]
        if len(own) != 1 or self._counts.get(oid) != 1:
            raise UnknownCondition
        # A function or LATERAL entry may fail on any row, before WHERE is evaluated.
        if any(
            entry.number("rtekind") == FUNCTION or entry.is_true("lateral") for entry in self._query.items("rtable")
        ):
            raise UnknownCondition
        return own[0]

    def _quals(self) -> list[Node]:
        """Return the conjuncts of WHERE, and of ON if all joins are inner; UnknownCondition if one may fail."""
        found = list(conjuncts(self._query["jointree"]["quals"]))
        others = [qual for join in joins(self._query) for qual in conjuncts(join["quals"])]
        if not all(map(self._cannot_fail, found + others)):
            raise UnknownCondition
        return found + others if self.is_plain else found

    def _cannot_fail(self, node: Item) -> bool:
        for each in below(node):
            if each.tag in ("OPEXPR", "SCALARARRAYOPEXPR"):
                if each.number("opno") not in self.operators:
                    return False
            elif each.tag == "FUNCEXPR":
                if each.number("funcid") not in _WIDENING:
                    return False
            elif each.tag not in _STEADY and each.tag not in _LEAVES:
                return False
        return True


class _TableConditions:
    """The conditions on one occurrence of a table."""

    def __init__(self, of: Conditions, place: int, columns: Mapping[int, str]) -> None:
        self._of, self._place, self._columns = of, place, columns

    def condition(self, node: Node) -> Condition:
        """Return the condition of a conjunct on this occurrence, or raise UnknownCondition."""
        match node.tag:
            case "BOOLEXPR" if node["boolop"] == "or":
                return AnyOf(tuple(self.condition(part) for part in node.items("args")))
            case "BOOLEXPR" if node["boolop"] == "and":
                return AllOf(tuple(self.condition(part) for part in node.items("args")))
            case "BOOLEXPR":
                (inner,) = node.items("args")
                return Comparison(self._column(inner, BOOL), "eq", (Const(False),))
            case "VAR":
                return Comparison(self._column(node, BOOL), "eq", (Const(True),))
            case "NULLTEST":
                return self._null_test(node)
            case "OPEXPR":
                return self._comparison(node)
            case "SCALARARRAYOPEXPR":
                return self._among(node)
        raise UnknownCondition

    def _null_test(self, node: Node) -> Condition:
        is_null = node["nulltesttype"] == "0"
        if node.is_true("argisrow") or (is_null and not self._of.is_plain):
            raise UnknownCondition
        return Comparison(self._column(node["arg"], None), "is" if is_null else "is_not", (Const(None),))

    def _comparison(self, node: Node) -> Condition:
        found = self._of.operators[node.number("opno")]
        left, right = node.items("args")
        op = found.op
        if not self._is_column(left):
            left, right, op = right, left, _TURNED[op]
        self._check(found, op, node)
        column = self._column(left, None)
        if op != "eq" and bare(left)["vartypmod"] != "-1":
            # The column would round or truncate the operand; the comparison does not.
            raise UnknownCondition
        return Comparison(column, op, (self._operand(right),))

    def _among(self, node: Node) -> Condition:
        found = self._of.operators[node.number("opno")]
        left, right = node.items("args")
        if found.op != "eq" or not node.is_true("useOr") or right.tag not in ("ARRAYEXPR", "ARRAY"):
            raise UnknownCondition
        if right.is_true("multidims"):
            raise UnknownCondition
        self._check(found, "eq", node)
        return Comparison(self._column(left, None), "in", tuple(map(self._operand, right.items("elements"))))

    def _check(self, found: Operator, op: str, node: Node) -> None:
        """Raise UnknownCondition if our bytes do not compare as PostgreSQL does."""
        sides = {found.left, found.right}
        is_alike = sides <= INTS or len(sides) == 1
        allowed = _EQUAL if op in ("eq", "ne") else _ORDERED
        if not is_alike or not sides <= allowed or node.number("inputcollid") in self._of.odd:
            raise UnknownCondition

    def _is_column(self, node: Item) -> bool:
        node = bare(node)
        return isinstance(node, Node) and node.tag == "VAR" and node.number("varno") == self._place

    def _column(self, node: Item, wanted: int | None) -> str:
        node = bare(node)
        if not self._is_column(node) or node.number("varlevelsup"):
            raise UnknownCondition
        number, kind = node.number("varattno"), node.number("vartype")
        if number < 1 or (wanted is not None and kind != wanted) or (wanted is None and kind not in _EQUAL | {VARCHAR}):
            raise UnknownCondition
        return self._columns[number]

    def _operand(self, node: Item) -> Operand:
        node = bare(node)
        if not isinstance(node, Node):
            raise UnknownCondition
        if node.tag == "PARAM" and node["paramkind"] == "0":
            return Param(self._of.names[node.number("paramid") - 1])
        if node.tag == "CONST":
            if not self._of.is_little:
                raise UnknownCondition
            return Const(_value(node))
        raise UnknownCondition


# --- reading trees -------------------------------------------------------------------------------------------


def _relation(entry: Node) -> int:
    return entry.number("relid") if entry.number("rtekind") == RELATION else 0


def joins(query: Node) -> list[Node]:
    """Return the joins of the query's own FROM."""
    found: list[Node] = []
    rest = list(query["jointree"].items("fromlist"))
    while rest:
        item = rest.pop()
        if item.tag == "JOINEXPR":
            found.append(item)
            rest += [item["larg"], item["rarg"]]
    return found


def conjuncts(node: Item) -> Iterator[Node]:
    """Yield the parts of a condition that must all be true."""
    if isinstance(node, Node):
        if node.tag == "BOOLEXPR" and node["boolop"] == "and":
            for part in node.items("args"):
                yield from conjuncts(part)
        else:
            yield node


def bare(node: Item) -> Item:
    """Return the expression without its relabelling from varchar to text."""
    while isinstance(node, Node) and node.tag == "RELABELTYPE" and node.number("resulttype") == TEXT:
        inner = node["arg"]
        if inner.tag == "VAR" and inner.number("vartype") not in (VARCHAR, TEXT):
            break
        node = inner
    return node


def _value(node: Node) -> Value:
    """Return a constant of the statement from PostgreSQL's binary form."""
    if node.is_true("constisnull"):
        return None
    data, kind = node["constvalue"], node.number("consttype")
    if not isinstance(data, bytes):
        raise UnknownCondition
    if kind in INTS:
        return int.from_bytes(data[: node.number("constlen")], "little", signed=True)
    if kind == BOOL:
        return data[0] != 0
    if kind == UUID_:
        return UUID(bytes=data)
    if kind == TEXT and data[0] & 3 == 0 and int.from_bytes(data[:4], "little") >> 2 == len(data):
        return data[4:].decode()
    try:
        if kind == DATE:
            days = int.from_bytes(data[:4], "little", signed=True)
            return Date((_EPOCH + datetime.timedelta(days=days)).date().isoformat())
        if kind in (TIMESTAMP, TIMESTAMPTZ):
            moment = _EPOCH + datetime.timedelta(microseconds=int.from_bytes(data[:8], "little", signed=True))
            return DateTime(moment.isoformat() + ("+00:00" if kind == TIMESTAMPTZ else ""))
    except OverflowError:  # infinity, or a year that Python does not support
        raise UnknownCondition from None
    raise UnknownCondition
