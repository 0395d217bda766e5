"""Parser of PostgreSQL's normal form of a predicate (`pg_get_expr`): its words, columns and constants. Pure.

In it every constant has its type, and every operation its brackets. Anything else raises Unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

import msgspec

from headwater.model.literal import Value
from headwater.model.table import Table
from headwater.sources.postgres import types
from headwater.sources.postgres.schema.table_shapes import ident
from headwater.sources.python_predicate import Unknown

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>'[^']*(?:''[^']*)*')|(?P<quoted>"(?:[^"]|"")+")|(?P<number>\d+(?:\.\d+)?)|(?P<word>[A-Za-z_]\w*)
    |(?P<mark>::|<>|<=|>=|[-+*/%<>=~!@\#^&|?`]+|[()\[\],.]))""",
    re.VERBOSE | re.ASCII,
)
INTS = frozenset({types.INT2, types.INT4, types.INT8})
EXACT = INTS | {types.NUMERIC}
_TYPES = {
    "integer": types.INT4,
    "bigint": types.INT8,
    "smallint": types.INT2,
    "numeric": types.NUMERIC,
    "text": types.TEXT,
    "character varying": types.VARCHAR,
    "bpchar": types.BPCHAR,
    "date": types.DATE,
    "timestamp without time zone": types.TIMESTAMP,
    "timestamp with time zone": types.TIMESTAMPTZ,
    "uuid": types.UUID_,
    "boolean": types.BOOL,
}


class Operand(msgspec.Struct, frozen=True):
    """A side of a comparison: a column, or constants."""

    sql: str
    type: int
    column: int | None = None
    values: tuple[Value, ...] = ()


class Text:
    """The tokens and operands of a text, in order. `type_of` returns the type of a column."""

    def __init__(self, table: Table, type_of: Callable[[str], int], text: str) -> None:
        self._table, self._type_of, self._text = table, type_of, text
        self._tokens: list[tuple[str, str, int]] = []  # kind, text, start
        self._at = 0
        at, end = 0, len(text.rstrip())
        while at < end:
            found = _TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise Unknown
            self._tokens.append((found.lastgroup, found[found.lastgroup], found.start(found.lastgroup)))
            at = found.end()
        self._tokens.append(("end", "", len(text)))

    # --- tokens ------------------------------------------------------------------------------------------

    def _peek(self, ahead: int = 0) -> str:
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)][1]

    def _kind(self) -> str:
        return self._tokens[self._at][0]

    def _accept(self, *words: str) -> bool:
        if all(self._peek(ahead) == word for ahead, word in enumerate(words)):
            self._at += len(words)
            return True
        return False

    def _expect(self, *words: str) -> None:
        if not self._accept(*words):
            raise Unknown

    def _closing(self, start: int) -> int:
        """Return the index of the token that closes the bracket at token `start`."""
        depth = 0
        for place in range(start, len(self._tokens)):
            depth += self._tokens[place][1] == "(" and self._tokens[place][0] == "mark"
            depth -= self._tokens[place][1] == ")" and self._tokens[place][0] == "mark"
            if not depth:
                return place
        raise Unknown

    # --- operands ----------------------------------------------------------------------------------------

    def operand(self) -> Operand:
        """Return the next column or constant, with casts that change nothing; raise Unknown for anything else."""
        kind, text, _ = self._tokens[self._at]
        if kind == "mark" and text == "(":
            self._at += 1
            inner = self.operand()
            self._expect(")")
            return self._casted(inner) if self._peek() == "::" else inner
        self._at += 1
        if kind == "number":
            is_int = text.isdigit() and int(text) < 2**63
            oid = (types.INT4 if int(text) < 2**31 else types.INT8) if is_int else types.NUMERIC
            found = Operand(text, oid, None, (int(text) if is_int else Decimal(text),))
        elif kind == "string":
            return self._typed(text)
        elif kind == "word" and text in ("true", "false"):
            return Operand(text, types.BOOL, None, (text == "true",))
        elif kind == "word" and text == "NULL":
            self._expect("::")
            name, oid = self._type_name()
            return Operand(f"NULL::{name}", oid, None, (None,))
        elif kind in ("word", "quoted"):
            if self._peek() in ("(", "."):
                raise Unknown
            found = self._named(text)
        else:
            raise Unknown
        return self._casted(found) if self._peek() == "::" else found

    def _named(self, text: str) -> Operand:
        name = text[1:-1].replace('""', '"') if text.startswith('"') else text
        place = self._table.index.get(name)
        if place is None:
            raise Unknown
        return Operand(ident(name), self._type_of(name), place)

    def _casted(self, inner: Operand) -> Operand:
        """Return an operand whose cast changes nothing: varchar to text, or an integer constant to a wider number."""
        self._expect("::")
        name, oid = self._type_name()
        sql = f"({inner.sql})::{name}"
        if inner.column is not None:
            if inner.type == types.VARCHAR and oid == types.TEXT:
                return Operand(sql, types.TEXT, inner.column)
            raise Unknown
        if inner.type == oid or (inner.type in INTS and oid in (types.INT8, types.NUMERIC)):
            return Operand(sql, oid, None, inner.values)
        raise Unknown

    def _typed(self, text: str) -> Operand:
        self._expect("::")
        name, oid = self._type_name()
        raw = text[1:-1].replace("''", "'")
        try:
            value = types.converter(oid, {})(raw)
        except (ValueError, LookupError, ArithmeticError):
            raise Unknown from None
        return Operand(f"{text}::{name}", oid, None, (value,))

    def _type_name(self) -> tuple[str, int]:
        for name, oid in _TYPES.items():
            if self._accept(*name.split(" ")):
                if self._peek() in ("(", "["):
                    raise Unknown
                return name, oid
        raise Unknown

    def _array(self) -> Operand:
        """Return an `ARRAY[…]`, possibly in brackets with a cast to text[]."""
        if self._accept("("):
            inner = self._array()
            self._expect(")")
            if self._accept("::", "text", "[", "]") and inner.type == types.VARCHAR:
                return Operand(f"({inner.sql})::text[]", types.TEXT, None, inner.values)
            return inner
        self._expect("ARRAY", "[")
        items = [self.operand()]
        while self._accept(","):
            items.append(self.operand())
        self._expect("]")
        if any(item.column is not None or item.type != items[0].type for item in items):
            raise Unknown
        values = tuple(value for item in items for value in item.values)
        return Operand(f"ARRAY[{', '.join(item.sql for item in items)}]", items[0].type, None, values)
