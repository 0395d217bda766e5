"""A caller's work inside a transaction of PostgreSQL: row operations, statements, schema changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from headwater.errors import InvalidRequest
from headwater.model.literal import Value
from headwater.model.predicate import Expr
from headwater.model.table import Row, Table
from headwater.sources.postgres.protocol_session import Answer, Link, own_values
from headwater.sources.postgres.query.statement_rules import check_ours, examine, run_statement
from headwater.sources.postgres.schema.relations import split_name
from headwater.sources.postgres.schema.table_shapes import OURS, Shape, Shapes, ident
from headwater.sources.postgres.sql import Renderer, create_table, order_by
from headwater.sources.postgres.values import Bound
from headwater.sources.query import Args
from headwater.sources.request_checks import check_numbered, exists
from headwater.sources.write import Result, Session

MAX_PARAMS = 30_000  # of one INSERT; the protocol allows 65,535


class PostgresSession(Session):
    """A session of a caller. `before_write` runs before a statement that may change something;
    `grants` returns the statements to run on a new table, `publish` publishes new tables."""

    def __init__(
        self,
        link: Link,
        shapes: Shapes,
        before_write: Callable[[], None] = lambda: None,
        grants: Callable[[str], Sequence[str]] = lambda table: (),
        publish: Callable[[Link], None] = lambda link: None,
    ) -> None:
        self._link, self._shapes, self._before_write, self._grants = link, shapes, before_write, grants
        self._publish = publish
        self._known: dict[str, Shape] = {}  # valid in this transaction: the table is locked, or was not read
        self.has_read = False  # rows were read, and later statements may depend on them

    def describe(self, table: str) -> Table:
        return self._shape(table).table

    def _shape(self, name: str) -> Shape:
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._shapes.shape(self._link, name)
        return found

    def select(self, table: str, where: Expr | None, limit: int | None = None) -> list[Row]:
        shape = self._shape(table)
        text = Renderer(shape)
        sql = f"SELECT {shape.column_list} FROM {shape.own}{text.where(where)}{order_by(shape.table)}"
        if limit is not None:
            sql += f" LIMIT {int(limit)}"
        self.has_read = True
        return shape.rows(self._run(shape, sql, text.params))

    def insert(
        self, table: str, rows: Sequence[dict[str, Value]], *, returning: bool = True
    ) -> tuple[Result, list[Row]]:
        self._before_write()
        shape = self._shape(table)
        lone = shape.table.lone_key  # numbered by the database if it is an i64 and `auto`
        numbered = lone.name if lone is not None and lone.kind == "i64" and lone.auto else None
        back = shape.column_list if returning else ident(numbered) if numbered else ""
        stored: list[Row] = []
        last: Value = 0
        for names, some in _batches(rows):
            sql, params = _insert(shape, names, some)
            answer = self._run(shape, f"{sql} RETURNING {back}" if back else sql, params)
            if returning:
                stored += shape.rows(answer)
            if numbered and answer.rows:
                last = stored[-1][shape.place(numbered)] if returning else answer.values()[-1][0]
        return Result(affected=len(rows), last_insert_id=last if isinstance(last, int) else 0), stored

    def update(self, table: str, where: Expr | None, values: dict[str, Value], limit: int | None) -> Result:
        self._before_write()
        shape = self._shape(table)
        text = Renderer(shape)
        assign = ", ".join(f"{text.column(name)} = {text.bind(value, name)}" for name, value in values.items())
        sql = f"UPDATE {shape.own} SET {assign}{text.limited(where, limit)}"
        return Result(affected=self._run(shape, sql, text.params).affected)

    def delete(self, table: str, where: Expr | None, limit: int | None) -> Result:
        self._before_write()
        shape = self._shape(table)
        text = Renderer(shape)
        sql = f"DELETE FROM {shape.own}{text.limited(where, limit)}"
        return Result(affected=self._run(shape, sql, text.params).affected)

    def _run(self, shape: Shape, sql: str, params: Sequence[Bound]) -> Answer:
        with own_values(not shape.has_rules):
            return self._link.run(sql, params)

    def execute(self, sql: str, args: Args = ()) -> Result:
        statement, bound = examine(self._link, sql, args)
        if not statement.read_only:
            self._before_write()
            self._link.is_tainted = True
        self.has_read = True
        result = run_statement(self._link, statement, bound)
        check_ours(self._link)
        if statement.schema or statement.first == "do":
            self._publish(self._link)
            self._known.clear()
        return result

    def is_read_only(self, sql: str) -> bool:
        return examine(self._link, sql, None)[0].read_only

    def create_table(self, table: Table, *, if_not_exists: bool = False) -> bool:
        parts = split_name(table.name)
        if parts is None or parts[0].startswith((OURS, "pg_")) or parts[1].startswith((OURS, "pg_")):
            raise InvalidRequest(
                f"{table.name!r} is not a table name; names beginning with {OURS!r} or 'pg_' are reserved",
                hint="Choose another name; a dot separates schema and table.",
            )
        if self._shapes.find(self._link, table.name) is not None:
            if not if_not_exists:
                raise exists(table)
            return False
        self._before_write()
        check_numbered(table)
        name = f"{ident(parts[0])}.{ident(parts[1])}"
        self._link.run(create_table(table, name))
        self._link.run(f"ALTER TABLE {name} REPLICA IDENTITY FULL")
        for grant in self._grants(name):
            self._link.run(grant)
        self._publish(self._link)
        self._known.clear()
        return True

    def drop_table(self, table: str, *, if_exists: bool = False) -> bool:
        found = self._shapes.find(self._link, table)
        if found is None and if_exists:
            return False
        shape = found or self._shape(table)
        self._before_write()
        self._link.run(f"DROP TABLE {shape.sql}")
        self._known.clear()
        return True


def _batches(rows: Sequence[dict[str, Value]]) -> Iterator[tuple[tuple[str, ...], list[dict[str, Value]]]]:
    """Yield the rows of each INSERT: adjacent rows with the same columns."""
    for names, group in groupby(rows, key=tuple):
        some = list(group)
        size = max(MAX_PARAMS // len(names), 1) if names else 1
        for start in range(0, len(some), size):
            yield names, some[start : start + size]


def _insert(shape: Shape, names: tuple[str, ...], rows: Sequence[dict[str, Value]]) -> tuple[str, list[Bound]]:
    if not names:
        return f"INSERT INTO {shape.sql} DEFAULT VALUES", []
    text = Renderer(shape)
    columns = ", ".join(map(text.column, names))
    lines = ["(" + ", ".join(text.bind(row[name], name) for name in names) + ")" for row in rows]
    return f"INSERT INTO {shape.sql} ({columns}) VALUES {', '.join(lines)}", text.params
