"""Predicates as Python functions, for the part of SQL that means the same in Python and PostgreSQL.

The input is not the caller's text but PostgreSQL's normal form (`pg_get_expr`), in which every constant has its type
and every operation its brackets. The parsed parts are written as SQL again, and PostgreSQL must find them equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from headwater.model.literal import UNAVAILABLE, Date, DateTime, Value
from headwater.model.table import Row, Table
from headwater.sources.postgres import types
from headwater.sources.postgres.key_order import is_odd, is_own_order
from headwater.sources.postgres.query.predicate_text import EXACT, INTS, Operand, Text
from headwater.sources.python_predicate import Check, Constants, PythonPredicate, Unknown, joined, negation

_TEXTS = frozenset({types.TEXT, types.VARCHAR})
_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "<>": "<>"}
_PYTHON = {"=": "==", "<>": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
# The Python classes that compare as PostgreSQL does, by type; PostgreSQL evaluates other values of such a column.
_CLASSES: dict[int, tuple[type, ...]] = {
    **dict.fromkeys(INTS, (int,)),
    types.NUMERIC: (Decimal,),
    **dict.fromkeys((types.TEXT, types.VARCHAR, types.BPCHAR), (str,)),
    types.DATE: (Date,),
    **dict.fromkeys((types.TIMESTAMP, types.TIMESTAMPTZ), (DateTime,)),
    types.UUID_: (UUID,),
    types.BOOL: (bool,),
}


class Program(msgspec.Struct, frozen=True):
    """The parts of a predicate, joined by AND, that Python can evaluate."""

    sql: str  # those parts as we write them
    theirs: str  # those parts as PostgreSQL wrote them
    parts: tuple[PythonPredicate, ...]
    is_whole: bool  # no part is missing
    check: Check  # True also if a value is unavailable and no other part is false; raises Unknown


def read(table: Table, type_of: Callable[[str], int], odd: Sequence[str], text: str) -> Program | None:
    """Return the program of a predicate in normal form; None if Python can evaluate none of its parts."""
    reader = _Reader(table, type_of, odd, text)
    try:
        found = reader.conjunction()
        parts = [(part, theirs) for part, theirs in found if part is not None]
        if not parts:
            return None
        made = tuple(part for part, _ in parts)
        check = reader.function(made)
    except (Unknown, RecursionError, SyntaxError, MemoryError):  # Python's parser allows less nesting than PostgreSQL's
        return None
    sql = " AND ".join(f"({part.sql})" for part in made)
    theirs = " AND ".join(f"({theirs})" for _, theirs in parts)
    return Program(sql, theirs, made, len(parts) == len(found), check)


class _Reader(Text):
    def __init__(self, table: Table, type_of: Callable[[str], int], odd: Sequence[str], text: str) -> None:
        super().__init__(table, type_of, text)
        self._odd = odd
        self._constants = Constants()

    # --- the whole ---------------------------------------------------------------------------------------

    def conjunction(self) -> list[tuple[PythonPredicate | None, str]]:
        """Return the parts joined by AND, None for those that Python cannot evaluate; each with PostgreSQL's text."""
        last = len(self._tokens) - 1
        start = self._at
        if self._peek() == "(" and self._closing(start) == last - 1:
            parts = self._split(start + 1, last - 1)
            if len(parts) > 1:
                return [self._try(low, high) for low, high in parts]
        return [self._try(start, last)]

    def _split(self, low: int, high: int) -> list[tuple[int, int]]:
        """Return the token ranges between the ANDs of one level."""
        found, start, place = [], low, low
        while place < high:
            kind, text, _ = self._tokens[place]
            if kind == "mark" and text == "(":
                place = self._closing(place)
            elif kind == "word" and text == "AND":
                found.append((start, place))
                start = place + 1
            elif kind == "word" and text in ("OR", "BETWEEN"):
                return [(low, high)]
            place += 1
        return [*found, (start, high)]

    def _try(self, low: int, high: int) -> tuple[PythonPredicate | None, str]:
        theirs = self._text[self._tokens[low][2] : self._tokens[high][2]]
        self._at = low
        try:
            part = self._predicate()
            if self._at != high:
                raise Unknown
        except Unknown:
            return None, theirs
        return part, theirs

    # --- predicates --------------------------------------------------------------------------------------

    def _predicate(self) -> PythonPredicate:
        if self._peek() == "(" and self._kind() == "mark":
            end = self._closing(self._at)
            after = self._tokens[end + 1][1] if end + 1 < len(self._tokens) else ""
            if after not in ("::", "=", "<>", "<", "<=", ">", ">=", "IS", ".", "COLLATE"):
                self._at += 1
                found = self._joined()
                self._expect(")")
                return found
        return self._comparison()

    def _joined(self) -> PythonPredicate:
        parts = [self._predicate()]
        word = self._peek() if self._peek() in ("AND", "OR") else ""
        while word and self._accept(word):
            parts.append(self._predicate())
        return parts[0] if len(parts) == 1 else joined(word, parts)

    def _comparison(self) -> PythonPredicate:
        if self._accept("NOT"):
            return negation(self._predicate())
        left = self.operand()
        operator = self._peek()
        if operator == "IS":
            return self._is(left)
        if operator not in _PYTHON or self._kind() != "mark":
            return self._truth(left)
        self._at += 1
        for word, wanted in (("ANY", "="), ("ALL", "<>")):
            if self._accept(word, "("):
                if operator != wanted:
                    raise Unknown
                options = self._array()
                self._expect(")")
                return self._member(f"({left.sql} {operator} {word} ({options.sql}))", left, options, operator)
        right = self.operand()
        sql = f"({left.sql} {operator} {right.sql})"
        if left.column is None:
            left, right, operator = right, left, _TURNED[operator]
        if left.column is None or right.column is not None:
            raise Unknown
        if operator in ("=", "<>"):
            return self._member(sql, left, right, operator)
        return self._ordered(sql, left, operator, right)

    def _is(self, left: Operand) -> PythonPredicate:
        self._expect("IS")
        if left.column is None:
            raise Unknown
        if self._accept("DISTINCT", "FROM"):
            return self._distinct(left, self.operand())
        no = self._accept("NOT")
        value, places = f"v{left.column}", frozenset({left.column})
        word = self._peek()
        if word not in ("NULL", "TRUE", "FALSE") or (word != "NULL" and left.type != types.BOOL):
            raise Unknown
        self._at += 1
        test = f"({value} is {word.title() if word != 'NULL' else 'None'})"
        true, false = (f"(not {test})", test) if no else (test, f"(not {test})")
        return PythonPredicate(f"({left.sql} IS {'NOT ' if no else ''}{word})", true, false, places)

    def _distinct(self, left: Operand, right: Operand) -> PythonPredicate:
        """Return IS DISTINCT FROM, which is never NULL: NULL equals NULL here."""
        if right.column is not None:
            raise Unknown
        same = self._member("", left, right, "=").true if right.values[0] is not None else f"(v{left.column} is None)"
        place, _ = self._comparable(left, right)
        return PythonPredicate(f"({left.sql} IS DISTINCT FROM {right.sql})", f"(not {same})", same, frozenset({place}))

    def _truth(self, operand: Operand) -> PythonPredicate:
        if operand.type != types.BOOL:
            raise Unknown
        if operand.column is None:
            true, false = str(operand.values[0] is True), str(operand.values[0] is False)
            return PythonPredicate(operand.sql, true, false, frozenset())
        value = f"v{operand.column}"
        return PythonPredicate(operand.sql, f"({value} is True)", f"({value} is False)", frozenset({operand.column}))

    def _member(self, sql: str, left: Operand, right: Operand, operator: str) -> PythonPredicate:
        """Return `=` to one of the values, or `<>` to all of them."""
        place, fold = self._comparable(left, right)
        known = [fold(value) for value in right.values if value is not None]
        value = self._value(left)
        match = f"({value} in {self._constants.name(frozenset(known))})" if len(known) != 1 else ""
        match = match or f"({value} == {self._constants.name(known[0])})"
        differs = f"(not {match})" if len(known) == len(right.values) else "False"
        is_there = f"v{place} is not None"
        true, false = f"({is_there} and {match})", f"({is_there} and {differs})"
        if not right.values:  # not even NULL is a member of an empty list
            true, false = "False", "True"
        places = frozenset({place})
        if operator == "<>":
            return PythonPredicate(sql, false, true, places)
        values = tuple(value for value in right.values if value is not None)
        return PythonPredicate(sql, true, false, places, self._table.names[place], values)

    def _ordered(self, sql: str, left: Operand, operator: str, right: Operand) -> PythonPredicate:
        place, fold = self._comparable(left, right)
        column = self._table.columns[place]
        if left.type == types.BOOL or (left.type in (*_TEXTS, types.BPCHAR) and not is_own_order(column)):
            raise Unknown
        (literal,) = right.values
        if literal is None:
            return PythonPredicate(sql, "False", "False", frozenset({place}))
        constant = fold(literal)
        if left.type in (*_TEXTS, types.BPCHAR):
            constant = constant.encode("utf-8", "surrogateescape")
        test = f"({self._value(left, ordered=True)} {_PYTHON[operator]} {self._constants.name(constant)})"
        is_there = f"v{place} is not None"
        return PythonPredicate(sql, f"({is_there} and {test})", f"({is_there} and not {test})", frozenset({place}))

    def _comparable(self, left: Operand, right: Operand) -> tuple[int, Callable[[Value], Any]]:
        """Return the column's number, and the function that prepares a constant for comparison; or raise Unknown."""
        if left.column is None or is_odd(self._table.columns[left.column], self._odd):
            raise Unknown
        pair = left.type, right.type
        if pair[0] in EXACT and pair[1] in EXACT:
            is_finite = all(
                v is None or isinstance(v, int) or (isinstance(v, Decimal) and v.is_finite()) for v in right.values
            )
            if not is_finite:
                raise Unknown
            return left.column, _plain
        if left.type == types.BPCHAR and right.type == types.BPCHAR:
            return left.column, _stripped
        texts = pair[0] in _TEXTS and pair[1] in _TEXTS
        if not texts and (pair[0] != pair[1] or pair[0] not in _CLASSES):
            raise Unknown
        if any(value is not None and not isinstance(value, _CLASSES[left.type]) for value in right.values):
            raise Unknown
        return left.column, _plain

    def _value(self, operand: Operand, *, ordered: bool = False) -> str:
        """Return the Python text of a column's value for comparison; other classes raise Unknown, for PostgreSQL."""
        place, kind = operand.column, operand.type
        classes = self._constants.name(_CLASSES[kind])
        value = f"(v{place} if v{place}.__class__ in {classes} else unknown())"
        if kind == types.NUMERIC:
            value = f"finite({value})"
        if kind == types.BPCHAR:
            value = f"{value}.rstrip(' ')"
        if kind in (types.DATE, types.TIMESTAMP, types.TIMESTAMPTZ):
            value = f"{value}.iso"
        if ordered and kind in (*_TEXTS, types.BPCHAR):
            value = f"{value}.encode('utf-8', 'surrogateescape')"
        return value

    # --- the function ------------------------------------------------------------------------------------

    def function(self, parts: Sequence[PythonPredicate]) -> Check:
        """Return the check of rows in Python: True means that no part is false, as far as values are known."""
        used = sorted(frozenset[int]().union(*(part.columns for part in parts)))
        lines = ["def check(rows):", " found = []", " for row in rows:"]
        lines += [f"  v{place} = row[{place}]" for place in used]
        if used:
            unavailable = " or ".join(f"v{place} is unavailable" for place in used)
            lines += [f"  if {unavailable}:", "   found.append(maybe(row))", "   continue"]
        lines += [f"  found.append(bool({' and '.join(part.true for part in parts)}))", " return found"]
        names = dict(_NAMES, **self._constants)
        names["maybe"] = self._maybe(parts, names)
        exec("\n".join(lines), names)  # the text has only our names and operators; values are constants
        made: Check = names["check"]
        return made

    def _maybe(self, parts: Sequence[PythonPredicate], names: dict[str, Any]) -> Callable[[Row], bool]:
        """Return the check of rows with unavailable values: whether the parts that can be evaluated hold."""
        tests = []
        for part in parts:
            binds = "".join(f"v{place} = row[{place}]; " for place in sorted(part.columns))
            scope: dict[str, Any] = names
            exec(f"def test(row):\n {binds}return bool({part.true})", scope)
            tests.append((part.columns, scope.pop("test")))
        return lambda row: all(any(row[p] is UNAVAILABLE for p in places) or test(row) for places, test in tests)


def _unknown() -> Any:
    raise Unknown


def _finite(value: Decimal) -> Decimal:
    if value.is_nan():  # PostgreSQL treats NaN as equal to itself, and as the largest number
        raise Unknown
    return value


def _plain(value: Value) -> Any:
    return value.iso if isinstance(value, Date | DateTime) else value


def _stripped(value: Value) -> Any:
    return value.rstrip(" ") if isinstance(value, str) else value


_NAMES: dict[str, Any] = {"unknown": _unknown, "finite": _finite, "unavailable": UNAVAILABLE}
