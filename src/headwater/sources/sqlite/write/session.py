"""A caller's work inside one transaction of SQLite: row operations, statements, schema changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import apsw
import msgspec

from headwater.errors import AnswerTooLarge, HeadwaterError, InvalidRequest
from headwater.model.answer_limits import FEWER, MAX_ROWS, MEMORY, AnswerRows
from headwater.model.literal import Value
from headwater.model.predicate import Expr
from headwater.model.table import Row, Table
from headwater.sources.sqlite.capture.trigger_installation import read_kinds, reconcile, remove_triggers, set_meta
from headwater.sources.sqlite.catalog import Catalog, intruders
from headwater.sources.sqlite.connection import OURS, ident, sqlite_errors
from headwater.sources.sqlite.query.authorizer import MAX_LENGTH, Guard, Statement
from headwater.sources.sqlite.row_fetch import as_blobs, collect, fetch, join
from headwater.sources.sqlite.sql import Renderer, column_list, create_table, order_by
from headwater.sources.sqlite.types import FROM_STORED, to_stored
from headwater.sources.table_creation import check_numbered, exists
from headwater.sources.write import Result

T = TypeVar("T")
SPARE = 1 << 10  # bytes of a value past the limit of an answer, so that the limit is what is named
Args = Sequence[Value] | dict[str, Value]
SHORT_ROW = 1 << 18  # bytes
SMALL_ROW = 8 << 20  # bytes: larger rows are read in a way that keeps no other thread waiting


class SqliteSession:
    """Fulfils `Session`.

    `before_write` runs ahead of a statement that may change something; `known_good` is the offset up to which
    changes are known to have been captured in the schema's last known form.
    """

    def __init__(
        self,
        db: apsw.Connection,
        guard: Guard,
        catalog: Catalog,
        wanted: Collection[str],
        *,
        known_good: Callable[[], int],
        before_write: Callable[[], None],
    ) -> None:
        self._db, self._guard, self._catalog, self._wanted = db, guard, catalog, wanted
        self._known_good, self._before_write = known_good, before_write

    def describe(self, table: str) -> Table:
        """The table's shape."""
        return self._catalog.shape(table).table

    def select(self, table: str, where: Expr | None, limit: int | None = None) -> list[Row]:
        """Whole rows matching `where`, in key order."""
        shape = self._catalog.shape(table)
        text = Renderer(shape.table)
        sql = (
            f"SELECT {column_list(shape.table)} FROM {ident(table)}{text.where(where)} ORDER BY {order_by(shape.table)}"
        )
        if limit is not None:
            sql += f" LIMIT {int(limit)}"
        width = len(shape.table.columns)
        with sqlite_errors():
            rows = self._limited(sql, lambda: fetch(self._run, sql, text.bindings, width))
            return self._catalog.decode(shape, rows)

    def insert(
        self, table: str, rows: Sequence[dict[str, Value]], *, returning: bool = True
    ) -> tuple[Result, list[Row]]:
        """Insert all or none."""
        self._before_write()
        shape = self._catalog.shape(table)
        stored: list[tuple[Any, ...]] = []
        with sqlite_errors(), self._guard.limited():
            for row in rows:
                self._guard.check_time()
                sql = self._catalog.insert_text(shape.table, tuple(row), returning)
                stored += self._db.execute(sql, list(map(to_stored, row.values()))).fetchall()
        last = self._db.last_insert_rowid() if rows and shape.rowid else 0
        return Result(affected=len(rows), last_insert_id=last), self._catalog.decode(shape, stored) if stored else []

    def update(self, table: str, where: Expr | None, values: dict[str, Value], limit: int | None) -> Result:
        """Set `values` on matching rows."""
        self._before_write()
        shape = self._catalog.shape(table)
        text = Renderer(shape.table)
        assign = ", ".join(f"{text.column(name)} = {text.bind(value)}" for name, value in values.items())
        sql = f"UPDATE {ident(table)} SET {assign}{text.limited(shape.rowid, where, limit)}"
        return self._change(sql, text)

    def delete(self, table: str, where: Expr | None, limit: int | None) -> Result:
        """Delete matching rows."""
        self._before_write()
        shape = self._catalog.shape(table)
        text = Renderer(shape.table)
        return self._change(f"DELETE FROM {ident(table)}{text.limited(shape.rowid, where, limit)}", text)

    def execute(self, sql: str, args: Args = ()) -> Result:
        """One statement, data or schema."""
        self._catalog.look()
        statement = self._guard.examine(sql)
        if not statement.read_only:
            self._before_write()
        if statement.schema:
            return self._change_schema(sql, args, statement.alters)
        return self._execute(sql, args)

    def create_table(self, table: Table, *, if_not_exists: bool = False) -> bool:
        """Create `table` by kinds."""
        if table.name.lower().startswith((OURS, "sqlite_")):
            raise InvalidRequest(
                f"table names beginning with {OURS!r} or 'sqlite_' are taken", hint="Choose another name."
            )
        there = table.name in self._catalog.tables()
        if there and not if_not_exists:
            raise exists(table)
        if there:
            return False
        self._before_write()
        check_numbered(table)
        lone = table.lone_key
        if lone and lone.auto and lone.kind == "u64":
            self._remember_kind(table.name, lone.name, lone.kind)
        self._change_schema(create_table(table, if_not_exists=False), (), None)
        return True

    def drop_table(self, table: str, *, if_exists: bool = False) -> bool:
        """Drop `table`."""
        if if_exists and table not in self._catalog.tables():
            return False
        self._catalog.shape(table)
        self._before_write()
        self._change_schema(f"DROP TABLE {ident(table)}", (), None)
        return True

    def _execute(self, sql: str, args: Args) -> Result:
        return run_statement(self._db, self._guard, self._catalog, sql, args)

    def is_read_only(self, sql: str) -> bool:
        """See Session."""
        self._catalog.look()
        return self._guard.examine(sql).read_only

    def _run(self, sql: str, bindings: Any) -> apsw.Cursor:
        return self._db.execute(sql, bindings)

    def _change(self, sql: str, text: Renderer) -> Result:
        def change() -> Result:
            self._run(sql, text.bindings)
            return Result(affected=self._db.changes())

        with sqlite_errors():
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
            # What others did to the schema is told first, under its own name.
            reconcile(db, self._wanted, known_good=self._known_good())
            before = intruders(db)
        try:
            result = self._execute(sql, args)
        except HeadwaterError as error:
            # DROP COLUMN fails while a trigger of ours names the column: take them off and try once more.
            if alters is None or f"in trigger {OURS}" not in error.message:
                raise
            self._release(alters)
            result = self._execute(sql, args)
        with self._guard.own() as db, sqlite_errors():
            _refuse(intruders(db) - before)
            reconcile(db, self._wanted, known_good=0, ddl=sql)
        self._catalog.refresh()
        # A virtual table fills tables of its own as it is made: no rows of the caller.
        return msgspec.structs.replace(result, affected=0, last_insert_id=0)

    def _release(self, table: str) -> None:
        self._catalog.refresh()  # what others did may have given the table a new layout just now
        with self._guard.own() as db, sqlite_errors():
            for layout in self._catalog.layouts.values():
                if layout.active and layout.table.name.lower() == table.lower():
                    remove_triggers(db, layout.id)


def run_statement(
    db: apsw.Connection,
    guard: Guard,
    catalog: Catalog,
    sql: str,
    args: Args,
    *,
    most: int | None = None,
    seconds: float | None = None,
) -> Result:
    """Run one statement and collect its answer: `most` rows of it, within `seconds`, where they are given."""
    statement = guard.examine(sql)
    _check_count(statement, args)
    guard.forget_statement()
    before = db.total_changes()
    db.set_last_insert_rowid(0)  # so that only an INSERT of this statement shows
    try:
        with sqlite_errors(), guard.limited(seconds) as within, _memory_errors():
            limit = MAX_ROWS if most is None else most
            bound, read = _bindings(args), _reader(catalog, statement)
            rows, more = guard.in_tiers(
                statement, lambda last: _fetch(db, sql, bound, statement, limit, within, read, is_last=last)
            )
    except KeyError as error:
        raise InvalidRequest(f"argument {error.args[0]!r} is missing", hint="Send it in `args`.") from None
    changed = db.total_changes() != before
    return Result(
        columns=tuple(column.name for column in statement.columns),
        rows=rows,
        affected=db.changes() if changed else 0,
        last_insert_id=db.last_insert_rowid(),
        truncated=more,
    )


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except (MemoryError, apsw.NoMemError):
        hint = "Compute smaller values in one statement; if other large statements are running, try again."
        raise AnswerTooLarge("SQLite ran out of memory in this statement", hint=hint) from None


def _reader(catalog: Catalog, statement: Statement) -> Callable[[Any], Row]:
    """Return the function that turns a stored row into values."""
    readers = [FROM_STORED.get(catalog.kind(column)) for column in statement.columns]
    if not any(readers):
        return tuple
    return lambda row: tuple([read(value) if read else value for read, value in zip(readers, row, strict=True)])


def _refuse(names: set[str]) -> None:
    if names:
        raise InvalidRequest(
            f"{min(names)!r} uses a name that begins with {OURS!r}; those are Headwater's own",
            hint="Choose another name; statements, views and triggers cannot use Headwater's tables.",
        )


def _fetch(
    db: apsw.Connection,
    sql: str,
    bindings: Any,
    statement: Statement,
    limit: int,
    within: Callable[[int], None],
    read: Callable[[Any], Row],
    *,
    is_last: bool,
) -> tuple[AnswerRows, bool]:
    """Return the rows of a statement, and whether there are more; text that is not UTF-8 gets surrogates.

    A statement that only reads runs with limits for small rows first. If a value is larger, or is not UTF-8, it runs
    again with its text as blobs: those are copied, not decoded, while other threads wait. Unless `is_last`, a value
    that is too large raises TooBigError: the statement runs again with wider limits.
    """
    width, most = len(statement.columns), MEMORY.max_bytes
    if not statement.read_only:  # it cannot run twice
        return collect(db.execute(sql, bindings), read, limit, to_end=True)
    small = SMALL_ROW // max(width, 1)
    cap = db.limit(apsw.SQLITE_LIMIT_LENGTH)
    # Short values first: for those the clock is looked at less often, and its look keeps other threads waiting.
    sizes = sorted({min(SHORT_ROW, small, cap), min(small, cap)})
    for place, size in enumerate(sizes):
        within(size)
        try:
            return collect(db.execute(sql, bindings), read, limit)
        except UnicodeDecodeError:
            break
        except apsw.TooBigError:
            if not is_last and place == len(sizes) - 1:
                raise
    within(most + SPARE)
    blobs = as_blobs(sql.rstrip().rstrip(";"), width, most=most)
    try:
        return collect(db.execute(blobs, bindings), lambda row: read(join(row)), limit)
    except apsw.TooBigError:
        if not is_last or cap < most:
            raise
        made = f"the statement makes a value or a row of more than {min(most, MAX_LENGTH)} bytes"
        raise AnswerTooLarge(made, hint=FEWER) from None


def _check_count(statement: Statement, args: Args) -> None:
    """InvalidRequest for more or fewer arguments than places; by name they are looked up as they are needed."""
    wanted = len(statement.parameters)
    if not isinstance(args, dict) and len(args) != wanted:
        takes = "1 argument" if wanted == 1 else f"{wanted} arguments"
        hint = "Send one for each `?`, in their order." if wanted else "Leave them out, or write `?` where they belong."
        raise InvalidRequest(f"the statement takes {takes}, {len(args)} given", hint=hint)


def _bindings(args: Args) -> Any:
    if isinstance(args, dict):
        return {name: to_stored(value) for name, value in args.items()}
    return [to_stored(value) for value in args]
