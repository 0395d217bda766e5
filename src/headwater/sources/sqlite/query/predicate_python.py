"""Predicates as Python functions, for the part of SQL with a provably equal meaning in Python.

Our parser reads the text in linear time and is not trusted: every part is rendered as SQL again, and the caller
checks that SQLite compiles both texts to the same program.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from headwater.model.table import Column, Table
from headwater.sources.python_predicate import Check, Constants, PythonPredicate, Unknown, joined, negation
from headwater.sources.sqlite.connection import ident
from headwater.sources.sqlite.key_order import as_stored
from headwater.sources.sqlite.query.predicate_engine import Engine
from headwater.sources.sqlite.query.syntax import tree
from headwater.sources.sqlite.query.syntax.parser import parse_expression
from headwater.sources.sqlite.query.syntax.render import expression
from headwater.sources.sqlite.types import FROM_STORED, Stored

_NUMBERS = frozenset({int, float, bool})
_NUMERAL = re.compile(r"-?\d+(\.\d*)?([eE][+-]?\d+)?", re.ASCII)
_FOLD = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")
_EQUALS = {"=": "=", "==": "=", "<>": "<>", "!=": "<>", "IS": "IS", "IS NOT": "IS NOT"}
_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


class Program(msgspec.Struct, frozen=True):
    """The part of a predicate that Python can evaluate: those of its AND operands that it knows."""

    sql: str  # the whole predicate
    parts: tuple[PythonPredicate, ...]
    is_whole: bool  # no part is missing
    check: Check | None  # returns whether all `parts` are true; raises Unknown for a row that Python cannot evaluate
    is_exact: bool  # `check` never raises Unknown


def read(engine: Engine, where: str) -> Program | None:
    """Return the program of `where`; None if our parser cannot read it."""
    try:
        reader = _Reader(engine)
        found, sql = reader.conjunction(parse_expression(where))
        parts = tuple(part for part in found if part is not None)
        check = reader.function(parts) if parts else None
        return Program(sql, parts, len(parts) == len(found), check, reader.is_exact)
    except Exception:  # no failure of our parser matters: SQLite has accepted the text
        return None


class _Reader:
    """Converter of the syntax tree of one predicate to Python and SQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._table: Table = engine.table
        self._by_name = {_folded(column.name): place for place, column in enumerate(engine.table.columns)}
        self._constants = Constants()
        self._places: set[int] = set()
        self.is_exact = True  # no part raises Unknown for any row

    def conjunction(self, node: Any) -> tuple[list[PythonPredicate | None], str]:
        """Return the AND operands of `node`, None for those that Python cannot evaluate, and the SQL of `node`."""
        if isinstance(node, tree.Chain) and node.op == "AND":
            read = [self.conjunction(part) for part in node.parts]
            return [part for parts, _ in read for part in parts], f"({' AND '.join(sql for _, sql in read)})"
        try:
            part = self._part(node)
        except Unknown:
            return [None], f"({_written(node)})"
        return [part], part.sql

    def function(self, parts: Sequence[PythonPredicate]) -> Check:
        """Return a function that evaluates `parts` on rows."""
        lines = ["def check(rows):", " found = []", " for row in rows:"]
        for place in sorted(self._places):
            is_plain = self._table.columns[place].kind not in FROM_STORED
            lines.append(f"  v{place} = row[{place}]" if is_plain else f"  v{place} = stored(row[{place}])")
        lines += [f"  found.append(bool({' and '.join(part.true for part in parts)}))", " return found"]
        names = dict(_NAMES, **self._constants)
        exec("\n".join(lines), names)  # the text contains only our own names and operators; values are constants
        made: Check = names["check"]
        return made

    # --- nodes -----------------------------------------------------------------------------------------------

    def _part(self, node: Any) -> PythonPredicate:
        match node:
            case tree.Chain(op, parts):
                return joined(op, [self._part(part) for part in parts])
            case tree.Unary("NOT", of):
                return negation(self._part(of))
            case tree.Ref():
                return self._truth(node)
            case tree.Binary(op, left, right) if op in _EQUALS:
                return self._equal(_EQUALS[op], left, right)
            case tree.Binary(op, left, right) if op in _TURNED:
                return self._compared(op, left, right)
            case tree.Null(of, negated):
                return self._equal("IS NOT" if negated else "IS", of, tree.Literal("NULL"))
            case tree.In(of, negated, items) if items:
                part = self._member(of, items)
                return negation(part) if negated else part
            case tree.Between(of, low, high, negated):
                part = self._between(of, low, high)
                return negation(part) if negated else part
        raise Unknown

    def _truth(self, node: Any) -> PythonPredicate:
        sql, value, _ = self._column(node)
        self.is_exact = False  # for text and blobs, which a column of any declared type may hold
        return PythonPredicate(f"({sql})", f"truth({value})", f"({value} is not None and not truth({value}))")

    def _equal(self, operator: str, left: Any, right: Any) -> PythonPredicate:
        (left_sql, right_sql), value, column, literal = self._sides(left, right)
        sql = f"({left_sql} {operator} {right_sql})"
        if operator.startswith("IS"):
            if _boolean(left) is not None or _boolean(right) is not None:
                raise Unknown  # IS TRUE tests for truth, not for the number one
            match = f"{value} is None" if literal is None else self._matches(value, column, [literal])
            same, differs = match, f"(not ({match}))"
            return PythonPredicate(sql, same, differs) if operator == "IS" else PythonPredicate(sql, differs, same)
        part = self._is_one_of(sql, value, column, [literal])
        return part if operator == "=" else PythonPredicate(sql, part.false, part.true)

    def _member(self, node: Any, options: Sequence[Any]) -> PythonPredicate:
        name, value, column = self._column(node)
        literals = [self._literal(option) for option in options]
        sql = f"({name} IN ({', '.join(text for text, _ in literals)}))"
        return self._is_one_of(sql, value, column, [self._engine.as_compared(column, found) for _, found in literals])

    def _is_one_of(self, sql: str, value: str, column: Column, literals: Sequence[Stored]) -> PythonPredicate:
        known = tuple(literal for literal in literals if literal is not None)
        match = self._matches(value, column, known) if known else "False"
        differs = f"({value} is not None and not {match})" if len(known) == len(literals) else "False"
        return PythonPredicate(sql, match, differs, column=column.name, values=known)

    def _matches(self, value: str, column: Column, literals: Sequence[Stored]) -> str:
        fold = _COLLATIONS[column.collation]
        texts = frozenset(fold(literal) for literal in literals if isinstance(literal, str))
        if column.collation == "BINARY" or not texts:
            if len(literals) == 1:
                return f"({value} == {self._constants.name(literals[0])})"
            return f"({value} in {self._constants.name(frozenset(literals))})"
        others = frozenset(literal for literal in literals if not isinstance(literal, str))
        folded = f"{column.collation}({value}) in {self._constants.name(texts)}"
        return f"({value}.__class__ is str and {folded} or {value} in {self._constants.name(others)})"

    def _between(self, node: Any, low: Any, high: Any) -> PythonPredicate:
        sql = f"({self._column(node)[0]} BETWEEN {self._literal(low)[0]} AND {self._literal(high)[0]})"
        above, below = self._compared(">=", node, low), self._compared("<=", node, high)
        return msgspec.structs.replace(joined("AND", [above, below]), sql=sql)

    def _compared(self, operator: str, left: Any, right: Any) -> PythonPredicate:
        (left_sql, right_sql), value, column, literal = self._sides(left, right)
        sql = f"({left_sql} {operator} {right_sql})"
        if literal is None:
            return PythonPredicate(sql, "False", "False")
        is_turned = _column_name(left) is None
        true = self._ordered(_TURNED[operator] if is_turned else operator, value, column, literal)
        return PythonPredicate(sql, true, f"({value} is not None and not {true})")

    def _ordered(self, operator: str, value: str, column: Column, literal: Stored) -> str:
        """Return the comparison in SQLite's order: numbers before text, and text before blobs."""
        constant = self._constants.name(literal)
        before, after = f"{value}.__class__ in numbers", f"{value}.__class__ is bytes"
        if isinstance(literal, str):
            test = f"{value}.__class__ is str and ({self._text(operator, value, column, literal)})"
            return f"({test} or {before if operator[0] == '<' else after})"
        test = f"{before} and {value} {operator} {constant}"
        return f"({test})" if operator[0] == "<" else f"({test} or {after} or {value}.__class__ is str)"

    def _text(self, operator: str, value: str, column: Column, literal: str) -> str:
        name = column.collation
        folded = f"{name}({value}) {operator} {self._constants.name(_COLLATIONS[name](literal))}"
        if name != "BINARY":
            return folded
        return f"{value} {operator} {self._constants.name(literal)} if {value}.isascii() else {folded}"

    # --- leaves ----------------------------------------------------------------------------------------------

    def _sides(self, left: Any, right: Any) -> tuple[tuple[str, str], str, Column, Stored]:
        """Return a column and a literal: the SQL of both, the value's name, the column, the literal as compared."""
        is_turned = _column_name(left) is None
        name, value, column = self._column(right if is_turned else left)
        text, literal = self._literal(left if is_turned else right)
        texts = (text, name) if is_turned else (name, text)
        return texts, value, column, self._engine.as_compared(column, literal)

    def _column(self, node: Any) -> tuple[str, str, Column]:
        """Return a column: its SQL, the name of its value, and the column itself."""
        name = _column_name(node)
        place = self._by_name.get(_folded(name)) if name is not None else None
        if place is None:
            raise Unknown
        self._places.add(place)
        column = self._table.columns[place]
        return ident(column.name), f"v{place}", column

    def _literal(self, node: Any) -> tuple[str, Stored]:
        """Return a literal: its SQL and its value."""
        boolean = _boolean(node)
        if boolean is not None:
            # If a column is called TRUE, SQLite compiles another program, and the check of both texts fails.
            return str(boolean), boolean
        match node:
            case tree.Literal("NULL"):
                return "NULL", None
            case tree.Literal(text) if text.startswith("'"):
                return text, text[1:-1].replace("''", "'")
            case tree.Literal(text):
                return self._numeral(text)
            case tree.Unary("-", tree.Literal(text)):
                return self._numeral(f"-{text}")
        raise Unknown

    def _numeral(self, text: str) -> tuple[str, Stored]:
        if not _NUMERAL.fullmatch(text):
            raise Unknown
        is_small = len(text) < 18 and text.isdigit()
        return text, int(text) if is_small else self._engine.literal(text)


def _boolean(node: Any) -> int | None:
    """Return the value of TRUE and FALSE; None for other nodes."""
    if not isinstance(node, tree.Ref) or node.table is not None or node.is_quoted:
        return None
    return {"TRUE": 1, "FALSE": 0}.get(node.name.upper())


def _written(node: Any) -> str:
    """Return the SQL of a part that Python cannot evaluate."""
    for name in tree.names_in(node):
        name.boolean = _boolean(name)
    return expression(node)


def _column_name(node: Any) -> str | None:
    """Return the name of a column; any table qualifier is ignored, since there is only one table."""
    return node.name if isinstance(node, tree.Ref) and _boolean(node) is None else None


def _folded(name: str) -> bytes:
    return name.encode().lower()


def _binary(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _nocase(text: str) -> bytes:
    # SQLite stops parsing at a NUL, which changes nothing here: no literal contains one.
    return _binary(text).translate(_FOLD)


def _rtrim(text: str) -> bytes:
    return _binary(text).rstrip(b" ")


def _truth(value: Stored) -> bool:
    if value is None or value.__class__ in _NUMBERS:
        return bool(value)
    raise Unknown  # SQLite parses a number from the beginning of the text


_COLLATIONS = {"BINARY": _binary, "NOCASE": _nocase, "RTRIM": _rtrim}
_NAMES = {**_COLLATIONS, "numbers": _NUMBERS, "stored": as_stored, "truth": _truth}
