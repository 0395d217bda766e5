"""Conversion of expressions to facts: conditions on columns that follow from an expression being true, or false.

One function handles both cases (`want` True or False), so that NOT only swaps them and NULL needs no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from headwater.model.dependencies.dependency import Const, Operand, Param
from headwater.model.literal import I64_MAX
from headwater.sources.sqlite.query.facts.equality_closure import not_null
from headwater.sources.sqlite.query.facts.facts import (
    NEVER,
    All,
    Any_,
    Atom,
    Col,
    ComparisonRule,
    Fact,
    Formula,
    Occurrence,
    WorkLimit,
    rejected,
    rule_of,
    shares,
)
from headwater.sources.sqlite.query.syntax import tree

_OPS = {"=": "eq", "==": "eq", "<>": "ne", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}
_OPS |= {"IS": "is", "IS NOT": "is_not"}
_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_NEGATED = {"eq": "ne", "ne": "eq", "lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "is": "is_not", "is_not": "is"}
_COMPARES = frozenset(op for op in _OPS if not op.startswith("IS"))
_PATTERNS = frozenset(f"{no}{word}" for no in ("", "NOT ") for word in ("LIKE", "GLOB"))
_ARITHMETIC = frozenset(["+", "-", "*", "/", "%", "||", "&", "|", "<<", ">>"])
MAX_LIST = 1_000  # items of an IN list; a longer list is ignored

Lookup = Callable[[tree.Ref], Occurrence | None]


class Conditions:
    """Converter of the expressions of a block. `lookup` returns a name's occurrence, `real` SQLite's value of a number.

    `work` limits the cost of the whole statement.
    """

    def __init__(
        self, lookup: Lookup, parameters: tuple[str, ...], real: Callable[[str], float], work: WorkLimit
    ) -> None:
        self._lookup, self._parameters, self._real, self.work = lookup, parameters, real, work

    def facts(self, node: Any) -> list[Fact]:
        """Return the facts that follow from `node` being true."""
        found: list[Fact] = []
        for part in conjuncts(node):
            formula, equal = self.truth(part, True), self.equality(part)
            rejects = self._rejects(part, True) | (rejected(formula) if formula is not None else frozenset())
            found.append(Fact(formula, equal, rejects))
            found += [] if equal is None else self._are_not_null(part)
            if isinstance(part, tree.Chain):
                found += [Fact(None, pair) for pair in self._equal_in_all(part)]
            found += [Fact(one, None, rejected(one)) for one in ([] if formula is None else shares(formula))]
        self.work.spend(found)
        return found

    def _equal_in_all(self, node: tree.Chain) -> set[tuple[Col, Col]]:
        """Return the pairs of columns that are equal in every branch of an OR."""
        branches = [{self.equality(part) for part in conjuncts(branch)} for branch in node.parts]
        return {pair for pair in set.intersection(*branches) if pair is not None}

    def equality(self, node: Any) -> tuple[Col, Col] | None:
        """Return two columns that are equal where `node` is true, if both have the same comparison rule."""
        if not isinstance(node, tree.Binary) or node.op not in ("=", "=="):
            return None
        left, right = self._column(node.left), self._column(node.right)
        if left is None or right is None or left[1].rule != right[1].rule:
            return None
        return left[0], right[0]

    def _are_not_null(self, node: Any) -> Iterator[Fact]:
        for found in (self._column(node.left), self._column(node.right)):
            if found is not None and found[1][2]:
                yield not_null(found[0])

    # --- tests -----------------------------------------------------------------------------------------------

    def truth(self, node: Any, want: bool) -> Formula | None:
        """Return what must hold where `node` is true (`want`) or false; None where nothing is known."""
        match node:
            case tree.Ref() if node.stands_for is not None:
                return self.truth(node.stands_for, want)
            case tree.Unary(op="NOT"):
                return self.truth(node.of, not want)
            case tree.Chain():
                return self._chain(node, want)
            case tree.Binary(op=op) if op in _OPS:
                return self._compared(node, want)
            case tree.Between():
                return self._between(node, want)
            case tree.In(query=None):
                return self._listed(node, want)
            case tree.Null():
                is_null = want != node.negated
                return self._test(node.of, "is" if is_null else "is_not", (Const(None),))
            case tree.Literal() | tree.Ref() | tree.Unary():
                return self._constant(node, want)
        return None

    def _chain(self, node: tree.Chain, want: bool) -> Formula | None:
        parts = [self.truth(part, want) for part in node.parts]
        known = tuple(part for part in parts if part is not None)
        if (node.op == "AND") == want:
            return All(known) if known else None
        return Any_(known) if len(known) == len(parts) else None

    def _constant(self, node: Any, want: bool) -> Formula | None:
        found = self._operand(node)
        if not isinstance(found, Const) or not isinstance(found.value, int | None):
            return None
        is_it = found.value is not None and bool(found.value) == want
        return All(()) if is_it else NEVER

    def _compared(self, node: tree.Binary, want: bool) -> Formula | None:
        if isinstance(node.left, tree.Row) or isinstance(node.right, tree.Row):
            return self._rows(node, want)
        if node.op.startswith("IS") and (_is_boolean(node.right) or _is_boolean(node.left)):
            return None  # x IS TRUE tests the truth of x, not equality with 1
        op = _OPS[node.op]
        if not want:
            op = _NEGATED[op]
        value = self._operand(node.right)
        if value is not None:
            return self._test(node.left, op, (value,))
        value = self._operand(node.left)
        return None if value is None else self._test(node.right, _FLIPPED.get(op, op), (value,))

    def _rows(self, node: tree.Binary, want: bool) -> Formula | None:
        left, right = node.left, node.right
        if node.op not in ("=", "==") or not isinstance(left, tree.Row) or not isinstance(right, tree.Row):
            return None
        if len(left.items) != len(right.items):
            return None
        pairs = [tree.Binary("=", one, other) for one, other in zip(left.items, right.items, strict=True)]
        return self._chain(tree.Chain("AND", pairs), want)

    def _between(self, node: tree.Between, want: bool) -> Formula | None:
        want = want != node.negated
        low, high = self._operand(node.low), self._operand(node.high)
        if want and low is not None and high is not None:
            return self._test(node.of, "between", (low, high))
        parts: list[Any] = [tree.Binary(">=", node.of, node.low), tree.Binary("<=", node.of, node.high)]
        return self._chain(tree.Chain("AND", parts), want)

    def _listed(self, node: tree.In, want: bool) -> Formula | None:
        want = want != node.negated
        items = [self._operand(item) for item in node.items or ()]
        known = tuple(item for item in items if item is not None)
        if len(known) < len(items) or len(items) > MAX_LIST:
            return None
        if not items:
            return NEVER if want else None
        return self._test(node.of, "in" if want else "not_in", known)

    def _test(self, node: Any, op: str, operands: tuple[Operand, ...]) -> Formula | None:
        found = self._column(node)
        return None if found is None else Atom(found[0], op, operands)

    def _column(self, node: Any) -> tuple[Col, ComparisonRule] | None:
        """Return a bare column; a COLLATE that repeats the column's own collation is ignored."""
        if isinstance(node, tree.Collate):
            inner = self._column(node.of)
            return inner if inner is not None and inner[1][1] == node.name.upper() else None
        if isinstance(node, tree.Ref) and node.stands_for is not None:
            return self._column(node.stands_for)
        if not isinstance(node, tree.Ref):
            return None
        occurrence, kind = self._lookup(node), rule_of(node)
        return None if occurrence is None or kind is None else ((occurrence, node.column), kind)

    def _operand(self, node: Any) -> Operand | None:
        """Return a bare value, which has no affinity and no collation of its own."""
        match node:
            case tree.Bind():
                return Param(self._parameters[node.slot - 1])
            case tree.Literal():
                return self._literal(node.text)
            case tree.Ref(boolean=value) if value is not None:
                return Const(value)
            case tree.Unary(op="-", of=tree.Literal(text=text)) if text[0] in ".0123456789":
                return self._negative(text)
        return None

    def _literal(self, text: str) -> Operand | None:
        if text == "NULL":
            return Const(None)
        if text[0] == "'":
            return Const(text[1:-1].replace("''", "'"))
        if text[0] in "xX":
            return Const(bytes.fromhex(text[2:-1]))
        value = self._number(text)
        return Const(value) if value is not None else None

    def _negative(self, text: str) -> Operand | None:
        if text.replace("_", "").lstrip("0") == str(I64_MAX + 1):
            return Const(-I64_MAX - 1)
        value = self._number(text)
        return Const(-value) if value is not None else None

    def _number(self, text: str) -> int | float | None:
        text = text.replace("_", "")
        if text[:2] in ("0x", "0X"):
            return value if (value := int(text, 16)) <= I64_MAX else None
        if text.isdecimal() and int(text) <= I64_MAX:
            return int(text)
        return self._real(text)

    # --- NULLs -----------------------------------------------------------------------------------------------

    def _rejects(self, node: Any, want: bool) -> frozenset[Occurrence]:
        """Return the occurrences that keep `node` from being true (`want`) or false if all their columns are NULL."""
        match node:
            case tree.Chain():
                sets = [self._rejects(part, want) for part in node.parts]
                return frozenset().union(*sets) if (node.op == "AND") == want else frozenset.intersection(*sets)
            case tree.Unary(op="NOT"):
                return self._rejects(node.of, not want)
            case tree.Binary(op=op) if op in _COMPARES or op in _PATTERNS:
                return self._strict(node.left) | self._strict(node.right)
            case tree.Between() if want != node.negated:
                return self._strict(node.of)
            case tree.In() if want != node.negated or node.items:
                return self._strict(node.of)
            case tree.Null() if want == node.negated:
                return self._strict(node.of)
        return frozenset()

    def _strict(self, node: Any) -> frozenset[Occurrence]:
        """Return the occurrences that make the value NULL if all their columns are NULL."""
        match node:
            case tree.Ref() if node.stands_for is None:
                occurrence = self._lookup(node)
                return frozenset() if occurrence is None else frozenset({occurrence})
            case tree.Unary() | tree.Collate() | tree.Cast():
                return self._strict(node.of)
            case tree.Binary(op=op) if op in _ARITHMETIC:
                return self._strict(node.left) | self._strict(node.right)
        return frozenset()


def conjuncts(node: Any) -> Iterator[Any]:
    """Yield the operands of a top-level AND, nested ones included; `node` itself if it is no AND."""
    if isinstance(node, tree.Chain) and node.op == "AND":
        for part in node.parts:
            yield from conjuncts(part)
    elif node is not None:
        yield node


def _is_boolean(node: Any) -> bool:
    return isinstance(node, tree.Ref) and node.boolean is not None
