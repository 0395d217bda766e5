"""Work of a caller inside one transaction of SQLite: row operations, statements, schema changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import apsw
import msgspec

from headwater.errors import HeadwaterError, InvalidRequest
from headwater.model.literal import Value
from headwater.model.predicate import Expr
from headwater.model.table import Row, Table
from headwater.sources.query import Args
from headwater.sources.request_checks import check_numbered, exists
from headwater.sources.sqlite.capture.trigger_installation import read_kinds, reconcile, remove_triggers, set_meta
from headwater.sources.sqlite.catalog import intruders
from headwater.sources.sqlite.connection import OURS, ident, sqlite_errors
from headwater.sources.sqlite.database_file import GuardedConnection
from headwater.sources.sqlite.query.statement_execution import run_statement
from headwater.sources.sqlite.row_fetch import fetch
from headwater.sources.sqlite.sql import Renderer, column_list, create_table, order_by
from headwater.sources.sqlite.types import to_stored
from headwater.sources.write import Result, Session

T = TypeVar("T")


class SqliteSession(Session):
    """A session of a caller. `before_write` runs before a statement that may change something; `known_good` returns
    the offset up to which changes were captured in the last known form of the schema."""

    def __init__(
        self,
        connection: GuardedConnection,
        wanted: Collection[str] = (),
        *,
        known_good: Callable[[], int] = lambda: 0,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection, self._wanted = connection, wanted
        self._db, self._guard, self._catalog = connection.db, connection.guard, connection.catalog
        self._known_good, self._before_write = known_good, before_write
        self._reconciled: tuple[int, int] | None = None  # the schema to which we adapted capture last

    def describe(self, table: str) -> Table:
        return self._catalog.shape(table).table

    def select(self, table: str, where: Expr | None, limit: int | None = None) -> list[Row]:
        shape = self._catalog.shape(table)
        text = Renderer(shape.table)
        sql = (
            f"SELECT {column_list(shape.table)} FROM {ident(table)}{text.where(where)} ORDER BY {order_by(shape.table)}"
        )
        if limit is not None:
            sql += f" LIMIT {int(limit)}"
        width = len(shape.table.columns)
        with sqlite_errors():
            rows = self._limited(sql, lambda: fetch(self._db.execute, sql, text.bindings, width))
            return self._catalog.decode(shape, rows)

    def insert(
        self, table: str, rows: Sequence[dict[str, Value]], *, returning: bool = True
    ) -> tuple[Result, list[Row]]:
        self._before_write()
        shape = self._catalog.shape(table)
        stored: list[tuple[Any, ...]] = []
        with _row_write_errors(), self._guard.limited():
            for row in rows:
                self._guard.check_time()
                sql = self._catalog.insert_text(shape.table, tuple(row), returning)
                stored += self._db.execute(sql, list(map(to_stored, row.values()))).fetchall()
        last = self._db.last_insert_rowid() if rows and shape.rowid else 0
        return Result(affected=len(rows), last_insert_id=last), self._catalog.decode(shape, stored) if stored else []

    def update(self, table: str, where: Expr | None, values: dict[str, Value], limit: int | None) -> Result:
        self._before_write()
        shape = self._catalog.shape(table)
        text = Renderer(shape.table)
        assign = ", ".join(f"{text.column(name)} = {text.value(value)}" for name, value in values.items())
        sql = f"UPDATE {ident(table)} SET {assign}{text.limited(shape.rowid, where, limit)}"
        return self._change(sql, text)

    def delete(self, table: str, where: Expr | None, limit: int | None) -> Result:
        self._before_write()
        shape = self._catalog.shape(table)
        text = Renderer(shape.table)
        return self._change(f"DELETE FROM {ident(table)}{text.limited(shape.rowid, where, limit)}", text)

    def execute(self, sql: str, args: Args = ()) -> Result:
        """Run one statement, data or schema; after a schema change adapt capture to it."""
        self._catalog.refresh_unless_held()
        statement = self._guard.examine(sql)
        if not statement.read_only:
            self._before_write()
        if statement.schema:
            return self._change_schema(sql, args, statement.alters)
        return run_statement(self._connection, sql, args)

    def create_table(self, table: Table, *, if_not_exists: bool = False) -> bool:
        if table.name.lower().startswith((OURS, "sqlite_")):
            raise InvalidRequest(
                f"table names beginning with {OURS!r} or 'sqlite_' are reserved", hint="Choose another name."
            )
        if table.name in self._catalog.tables():
            if not if_not_exists:
                raise exists(table)
            return False
        self._before_write()
        check_numbered(table)
        lone = table.lone_key
        if lone and lone.auto and lone.kind == "u64":
            self._remember_kind(table.name, lone.name, lone.kind)
        self._change_schema(create_table(table), (), None)
        return True

    def drop_table(self, table: str, *, if_exists: bool = False) -> bool:
        if if_exists and table not in self._catalog.tables():
            return False
        self._catalog.shape(table)
        self._before_write()
        self._change_schema(f"DROP TABLE {ident(table)}", (), None)
        return True

    def is_read_only(self, sql: str) -> bool:
        self._catalog.refresh_unless_held()
        return self._guard.examine(sql).read_only

    def _change(self, sql: str, text: Renderer) -> Result:
        def change() -> Result:
            self._db.execute(sql, text.bindings)
            return Result(affected=self._db.changes())

        with _row_write_errors():
            return self._limited(sql, change)

    def _limited(self, sql: str, run: Callable[[], T]) -> T:
        """Run a row statement within the limits of a caller's statement."""
        with self._guard.limited():
            return self._guard.in_tiers(self._guard.examine(sql), lambda _: run())

    def _remember_kind(self, table: str, column: str, kind: str) -> None:
        with self._guard.own() as db:
            kinds = read_kinds(db)
            kinds.setdefault(table, {})[column] = kind
            set_meta(db, "kinds", msgspec.json.encode(kinds).decode())

    def _change_schema(self, sql: str, args: Args, alters: str | None) -> Result:
        with self._guard.own() as db, sqlite_errors():
            # Report schema changes by others first, under their own names.
            if _schema(db) != self._reconciled:
                reconcile(db, self._wanted, known_good=self._known_good())
            before = intruders(db)
        try:
            result = run_statement(self._connection, sql, args)
        except HeadwaterError as error:
            # DROP COLUMN fails while one of our triggers names the column: remove our triggers and retry.
            if alters is None or f"in trigger {OURS}" not in error.message:
                raise
            self._release(alters)
            result = run_statement(self._connection, sql, args)
        with self._guard.own() as db, sqlite_errors():
            if names := intruders(db) - before:
                raise InvalidRequest(
                    f"{min(names)!r} uses a name that begins with {OURS!r}, which is reserved for Headwater",
                    hint="Choose another name; statements, views and triggers cannot use Headwater's tables.",
                )
            reconcile(db, self._wanted, known_good=0, ddl=sql)
            self._reconciled = _schema(db)
        self._catalog.refresh()
        # A new virtual table fills tables of its own, which are not rows of the caller.
        return msgspec.structs.replace(result, affected=0, last_insert_id=0)

    def _release(self, table: str) -> None:
        self._catalog.refresh()  # a schema change by others may have just given the table a new layout
        with self._guard.own() as db, sqlite_errors():
            for layout in self._catalog.layouts.values():
                if layout.active and layout.table.name.lower() == table.lower():
                    remove_triggers(db, layout.id)


@contextmanager
def _row_write_errors() -> Iterator[None]:
    """Convert SQLite's errors to ours, and mark those of an outdated trigger, which may name any table."""
    try:
        with sqlite_errors():
            yield
    except InvalidRequest as error:
        if isinstance(error.__cause__, (apsw.SQLError, apsw.AuthError)):
            error.names_tables = True
        raise


def _schema(db: apsw.Connection) -> tuple[int, int]:
    """Return a value that differs after every schema change by us and every commit by another connection."""
    return int(str(db.pragma("schema_version"))), int(str(db.pragma("data_version")))
