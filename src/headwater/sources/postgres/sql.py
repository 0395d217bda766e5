"""Rendering of conditions and row statements into PostgreSQL's SQL: names are quoted, values are bound."""

from __future__ import annotations

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.literal import Value
from headwater.model.predicate import Case, Col, Expr, Literal
from headwater.model.table import Table
from headwater.sources.column_types import COLUMN_TYPES
from headwater.sources.postgres.schema.table_shapes import Shape, ident
from headwater.sources.postgres.types import declared_text
from headwater.sources.postgres.values import Bound, own_type, to_bound
from headwater.sources.query_text import OPERATORS, Expressions

_FUNCTIONS = {
    **{name: name for name in ("lower", "upper", "length", "octet_length", "abs", "sign", "nullif", "coalesce")},
    **{name: name for name in ("round", "replace", "substr", "ltrim", "rtrim", "floor", "ceil", "sqrt", "exp", "ln")},
    **{name: name for name in ("power", "concat", "concat_ws")},
    "substring": "substr",
    "trim": "btrim",
    "ifnull": "coalesce",
    "instr": "strpos",
    "unicode": "ascii",
    "char": "chr",
    "min": "least",
    "max": "greatest",
}
DECLARED = {kind: row.postgres for kind, row in COLUMN_TYPES.items() if row.postgres}


class PostgresExpressions(Expressions):
    """Renderer of expressions in PostgreSQL's dialect."""

    database, declared = "PostgreSQL", DECLARED
    operators = {**OPERATORS, "is": "IS NOT DISTINCT FROM", "ilike": "ILIKE"}

    def operator(self, op: str, args: list[str]) -> str:
        return "false" if op == "in" and len(args) == 1 else super().operator(op, args)

    def function(self, name: str, args: tuple[Expr, ...]) -> str:
        """Return a function of the JSON form by its name in PostgreSQL."""
        if name == "iif" and len(args) == 3:
            return self.expr(Case(((args[0], args[1]),), args[2]))
        if name not in _FUNCTIONS:
            raise NotSupported(
                f"function {name!r} has no counterpart in PostgreSQL",
                hint="Send SQL with PostgreSQL's functions by sql.exec.",
            )
        return super().function(_FUNCTIONS[name], args)


class Renderer(PostgresExpressions):
    """A renderer that collects parameters while it writes text. One per statement."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.params: list[Bound] = []

    def bind(self, value: Value, beside: str | None = None) -> str:
        """Return a placeholder for `value`, with the type of the column `beside` or else the value's own."""
        if beside is not None:
            self.params.append(self.shape.bound(beside, value))
            return f"${len(self.params)}::{self.shape.cast(beside)}"
        self.params.append(to_bound(value))
        return f"${len(self.params)}::{declared_text(own_type(value), -1, {})}"

    def column(self, name: str) -> str:
        """Return a quoted column of the table."""
        self.shape.place(name)
        return ident(name)

    def limited(self, expr: Expr | None, limit: int | None) -> str:
        """Return a WHERE that affects at most `limit` rows, the first in key order."""
        if limit is None:
            return self.where(expr)
        rest = f"FROM {self.shape.own}{self.where(expr)}{order_by(self.shape.table)} LIMIT {int(limit)}"
        if self.shape.table.key:
            keys = ", ".join(map(ident, self.shape.table.key))
            return f" WHERE ({keys}) IN (SELECT {keys} {rest})"
        # Without a key, by ctid: within the transaction's snapshot no row moves.
        if not self.shape.is_partitioned:
            return f" WHERE ctid = ANY (ARRAY(SELECT ctid {rest}))"
        return f" WHERE (tableoid, ctid) IN (SELECT tableoid, ctid {rest})"

    def col(self, col: Col) -> str:
        """Return a quoted column of the table."""
        return self.column(col.name)

    def value(self, value: Value) -> str:
        """Return a placeholder for `value`, with its own type."""
        return self.bind(value)

    def operands(self, op: str, args: tuple[Expr, ...]) -> list[str]:
        """Return the operands as SQL: a literal gets the type of the column that it is compared with."""
        beside = next((arg.name for arg in args if isinstance(arg, Col)), None)
        if op in ("and", "or", "not", "like", "ilike") or (
            beside and self.column(beside) and self._is_odd(beside, args)
        ):
            beside = None
        return [self.bind(arg.value, beside) if isinstance(arg, Literal) else self.expr(arg) for arg in args]

    def _is_odd(self, beside: str, args: tuple[Expr, ...]) -> bool:
        """Return whether a literal is a number that an integer column cannot hold: it is compared with its own type."""
        if self.shape.column(beside).kind != "i64":
            return False
        return any(isinstance(arg, Literal) and type(arg.value).__name__ in ("float", "Decimal", "U64") for arg in args)


def order_by(table: Table) -> str:
    """Return ` ORDER BY` the key, in the database's own order; "" without a key."""
    return f" ORDER BY {', '.join(map(ident, table.key))}" if table.key else ""


def create_table(table: Table, sql: str) -> str:
    """Return a CREATE TABLE for the kinds of the columns; the database numbers a single integer key."""
    lone = table.lone_key
    parts = []
    for column in table.columns:
        if column.kind not in DECLARED:
            raise InvalidRequest(
                f"column {column.name!r} of kind {column.kind} has no type in PostgreSQL",
                hint=f"Its kind is one of {', '.join(DECLARED)}.",
            )
        numbered = lone is not None and lone.name == column.name and (column.auto or column.kind == "i64")
        kind = "bigint" if numbered else DECLARED[column.kind]
        more = " GENERATED BY DEFAULT AS IDENTITY" if numbered else "" if column.nullable else " NOT NULL"
        parts.append(f"{ident(column.name)} {kind}{more}")
    if table.key:
        parts.append(f"PRIMARY KEY ({', '.join(map(ident, table.key))})")
    return f"CREATE TABLE {sql} ({', '.join(parts)})"
