"""The tables of a SQL sink: the target, which users read, and `headwater_sink`, which holds the sink's progress."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.schema import CreateColumn

from headwater.errors import PipelineError, SinkUnfit
from headwater.model.keys.key import Span
from headwater.pipeline.sinks.columns import column_reappeared
from headwater.pipeline.sinks.sink import Plan, State
from headwater.pipeline.sinks.sql.dialects import MYSQL, POSTGRES, SQLITE, Dialect, Field
from headwater.pipeline.sinks.sql.engine import reading, writing
from headwater.pipeline.sinks.sql.stage_tables import ATTEMPT, GONE, KEPT
from headwater.pipeline.transform.whole_rows import unknown

STATE_TABLE = "headwater_sink"
_TIME_DIGITS = 6  # of a second, unless the type says otherwise
_INSERT: dict[str, Any] = {POSTGRES: postgresql.insert, MYSQL: mysql.insert, SQLITE: sqlite.insert}


class StateTable:
    """The table with one row per target: the plan and the progress. A transaction that commits rows locks that row."""

    def __init__(self, engine: sa.Engine, dialect: Dialect, name: str, schema: str | None) -> None:
        self._engine, self._dialect, self._name = engine, dialect, name
        long = mysql.LONGTEXT(collation=dialect.collation) if dialect.backend == MYSQL else sa.Text()
        wide = mysql.VARCHAR(255, collation=dialect.collation) if dialect.backend == MYSQL else sa.String(255)
        self._table = sa.Table(
            STATE_TABLE,
            sa.MetaData(),
            sa.Column("name", wide, primary_key=True),
            sa.Column("plan", long),
            sa.Column("offset", sa.BigInteger, quote=True),
            sa.Column("loaded", long),
            sa.Column("updated_at", sa.DateTime, onupdate=sa.func.current_timestamp()),
            schema=schema,
            mysql_engine="InnoDB",
        )
        self._exists = False

    def prepare(self) -> None:
        """Create the table and this target's row without a plan, if they do not exist."""
        create_table(self._engine, self._table)
        insert = _INSERT[self._dialect.backend](self._table).values(name=self._name)
        quiet = insert.prefix_with("IGNORE") if self._dialect.backend == MYSQL else insert.on_conflict_do_nothing()
        with writing(self._engine) as connection:
            connection.execute(quiet)

    def read(self) -> State | None:
        """Return the state of the target as of the last commit; None before the first `begin`."""
        with reading(self._engine) as connection:
            if not self._exists and not sa.inspect(connection).has_table(STATE_TABLE, schema=self._table.schema):
                return None
            self._exists = True
            return self._state(connection.execute(self._select()).one_or_none())

    def lock(self, connection: sa.Connection) -> State | None:
        """Return the state and lock its row until the transaction ends."""
        return self._state(connection.execute(self._select().with_for_update()).one_or_none())

    def write(self, connection: sa.Connection, state: State | None) -> None:
        """Write the state of the target as part of the transaction; None removes its plan."""
        values: dict[str, Any] = {"plan": None}
        if state is not None:
            values = {
                "plan": msgspec.json.encode(state.plan).decode(),
                "offset": state.offset,
                "loaded": msgspec.json.encode(list(state.loaded.items())).decode(),
            }
        connection.execute(sa.update(self._table).where(self._table.c.name == self._name).values(values))

    def _select(self) -> sa.Select[Any]:
        columns = self._table.c
        return sa.select(columns.plan, columns.offset, columns.loaded).where(columns.name == self._name)

    def _state(self, row: Any) -> State | None:
        if row is None or row[0] is None:
            return None
        loaded = dict(msgspec.json.decode(row[2], type=list[tuple[Span, int]]))
        return State(msgspec.json.decode(row[0], type=Plan), row[1], loaded)


class Target:
    """The sink's destination table, which users query; staging tables and progress are elsewhere."""

    def __init__(self, name: str, schema: str | None, dialect: Dialect, fields: Sequence[Field]) -> None:
        self.fields = list(fields)
        self._dialect = dialect
        self._keys = [field.name for field in fields if field.is_key]
        dialect.check_names([name, *(field.name for field in fields)])
        columns = [dialect.column(field, field.name, fields) for field in fields]
        by_name = {column.name: column for column in columns}
        key = sa.PrimaryKeyConstraint(*(by_name[name] for name in self._keys))
        self.table = sa.Table(
            sa.quoted_name(name, True), sa.MetaData(), *columns, key, schema=schema, mysql_engine="InnoDB"
        )
        for name in self._keys:
            by_name[name].autoincrement = False

    def refuse_rows(self, engine: sa.Engine) -> None:
        """Raise SinkUnfit if the table exists and has rows."""
        with reading(engine) as connection:
            if not sa.inspect(connection).has_table(self.table.name, schema=self.table.schema):
                return
            found = connection.execute(sa.select(sa.literal(1)).select_from(self.table).limit(1)).first()
        if found is not None:
            raise SinkUnfit(
                f"table {self.table.name!r} contains rows that no pipeline wrote; the sink would delete them",
                hint="Name another table, or set `replace = true` in the sink to delete them.",
            )

    def prepare(self, engine: sa.Engine) -> set[str]:
        """Create the table or add its missing columns; return the columns it had. SinkUnfit if its key differs."""
        if not self._keys:
            raise SinkUnfit("a SQL sink needs a table with a key")
        create_table(engine, self.table)
        with reading(engine) as connection:
            there = sa.inspect(connection)
            found = there.get_columns(self.table.name, self.table.schema)
            held = {_plain(column["name"], self._dialect): column for column in found}
            key = there.get_pk_constraint(self.table.name, self.table.schema)["constrained_columns"]
            self._check_key([_plain(name, self._dialect) for name in key], held)
        for column in self.table.columns:
            if column.name not in held:
                self._add(engine, column)
        return set(held)

    def retyped(self, engine: sa.Engine) -> list[str]:
        """Return the columns of the table whose type may round or reject the values, which are of another type."""
        with reading(engine) as connection:
            found = sa.inspect(connection).get_columns(self.table.name, self.table.schema)
        held = {_plain(column["name"], self._dialect): column["type"] for column in found}
        names = [column.name for column in self.table.columns if column.name not in self._keys]
        return [name for name in names if not _keeps(held[name], self.table.c[name].type, self._dialect.backend)]

    def replace(self, engine: sa.Engine, names: Iterable[str]) -> None:
        """Create these columns of the empty table again, with their type."""
        for name in names:
            with writing(engine) as connection:
                preparer = connection.dialect.identifier_preparer
                dropped = f"{preparer.format_table(self.table)} DROP COLUMN {preparer.quote_identifier(name)}"
                connection.exec_driver_sql(f"ALTER TABLE {dropped}")
            self._add(engine, self.table.c[name])

    def refuse_values(self, connection: sa.Connection, columns: Iterable[str]) -> None:
        """Raise an error that asks for a new snapshot if one of these columns holds a value other than null."""
        for name in columns:
            held = sa.select(sa.literal(1)).select_from(self.table).where(self.table.c[name].is_not(None)).limit(1)
            if connection.execute(held).first() is not None:
                raise column_reappeared(name)

    def _check_key(self, key: list[str], held: dict[str, Any]) -> None:
        if set(key) != set(self._keys):
            raise SinkUnfit(
                f"table {self.table.name!r} has the primary key {key}; the sink needs {self._keys}",
                hint="Drop it, so that the sink creates it, or name another table.",
            )
        for name in self._keys:
            collation = getattr(held[name]["type"], "collation", None)
            if self._dialect.backend == MYSQL and collation not in (None, self._dialect.collation):
                raise SinkUnfit(
                    f"key column {name!r} of table {self.table.name!r} uses {collation}, which treats different texts"
                    " as equal",
                    hint=f"Give the column the collation {self._dialect.collation}.",
                )

    def _add(self, engine: sa.Engine, column: sa.Column[Any]) -> None:
        with writing(engine) as connection:
            preparer = connection.dialect.identifier_preparer
            added = str(CreateColumn(column).compile(dialect=connection.dialect))
            connection.exec_driver_sql(f"ALTER TABLE {preparer.format_table(self.table)} ADD COLUMN {added}")

    def empty(self, connection: sa.Connection) -> None:
        """Remove all rows inside the transaction; slow for a large MySQL table, where TRUNCATE would commit."""
        if self._dialect.backend == POSTGRES:
            preparer = connection.dialect.identifier_preparer
            connection.exec_driver_sql(f"TRUNCATE {preparer.format_table(self.table)}")
        else:
            connection.execute(sa.delete(self.table))

    def add(self, connection: sa.Connection, stage: sa.Table, names: Sequence[str], attempts: Sequence[str]) -> None:
        """Insert staged rows, all of them new; an existing key is an error."""
        connection.execute(sa.insert(self.table).from_select(list(names), self._select(stage, names, attempts)))

    def merge(self, connection: sa.Connection, stage: sa.Table, names: Sequence[str], attempts: Sequence[str]) -> None:
        """Remove the staged deletes, then insert or update the other staged rows; each key is staged once."""
        where: list[Any] = [stage.c[ATTEMPT].in_(attempts), stage.c[GONE].is_(sa.true())]
        pairs = [(self.table.c[name], stage.c[f"c{names.index(name)}"]) for name in self._keys]
        if self._dialect.backend == SQLITE:
            gone = sa.select(*(right for _, right in pairs)).where(*where)
            matched: list[Any] = [sa.tuple_(*(left for left, _ in pairs)).in_(gone)]
        else:
            matched = [*where, *(left == right for left, right in pairs)]
        connection.execute(sa.delete(self.table).where(*matched))
        rows = self._filled(connection, stage, names, attempts)
        if self._dialect.backend == MYSQL:
            self._put(connection, stage, names, attempts, rows)
            return
        insert = _INSERT[self._dialect.backend](self.table).from_select(list(names), rows)
        new = {name: insert.excluded[name] for name in names if name not in self._keys}
        connection.execute(insert.on_conflict_do_update(index_elements=self._keys, set_=new))

    def _put(
        self,
        connection: sa.Connection,
        stage: sa.Table,
        names: Sequence[str],
        attempts: Sequence[str],
        rows: sa.Select[Any],
    ) -> None:
        """Update the rows that exist, then insert the others.

        ON DUPLICATE KEY UPDATE would also match a row that shares only the value of another unique index, and would
        silently lose one of the two rows.
        """
        values = {
            self.table.c[name]: value
            for name, value in zip(names, rows.selected_columns, strict=True)
            if name not in self._keys
        }
        same = self._same(stage, names)
        if values:
            connection.execute(sa.update(self.table).where(*_stays(stage, attempts), same).values(values))
        both = stage.outerjoin(self.table, same)
        new = self._select(stage, names, attempts).select_from(both).where(self.table.c[self._keys[0]].is_(None))
        connection.execute(sa.insert(self.table).from_select(list(names), new))

    def _filled(
        self, connection: sa.Connection, stage: sa.Table, names: Sequence[str], attempts: Sequence[str]
    ) -> sa.Select[Any]:
        """Return the staged rows, with unchanged columns filled from the target."""
        rows = self._select(stage, names, attempts)
        which = rows.with_only_columns(stage.c[KEPT]).where(stage.c[KEPT].is_not(None)).distinct()
        told = {str(text): {*map(int, text.split(","))} for (text,) in connection.execute(which)}
        if not told:
            return rows
        both = stage.outerjoin(self.table, self._same(stage, names))
        columns = []
        for place, name in enumerate(names):
            texts = [text for text, places in told.items() if place in places]
            own, has = stage.c[f"c{place}"], self.table.c[name]
            columns.append(sa.case((stage.c[KEPT].in_(texts), has), else_=own) if texts else own)
        missing = rows.with_only_columns(sa.literal(1)).select_from(both)
        missing = missing.where(stage.c[KEPT].is_not(None), self.table.c[self._keys[0]].is_(None)).limit(1)
        if connection.execute(missing).first() is not None:
            raise unknown()
        return rows.with_only_columns(*columns).select_from(both)

    def _same(self, stage: sa.Table, names: Sequence[str]) -> sa.ColumnElement[bool]:
        """Return the condition that a staged row and a row of the target have equal keys."""
        return sa.and_(*(self.table.c[name] == stage.c[f"c{names.index(name)}"] for name in self._keys))

    def _select(self, stage: sa.Table, names: Sequence[str], attempts: Sequence[str]) -> sa.Select[Any]:
        columns = [stage.c[f"c{place}"] for place in range(len(names))]
        return sa.select(*columns).where(*_stays(stage, attempts))


def _stays(stage: sa.Table, attempts: Sequence[str]) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the conditions that select staged rows of `attempts` that are not deletes."""
    return stage.c[ATTEMPT].in_(attempts), stage.c[GONE].is_(sa.false())


def _keeps(held: Any, wanted: Any, backend: str) -> bool:
    """Return whether a column of type `held` keeps every value of type `wanted`; True for types without a family."""
    has, needs = _family(held, backend), _family(wanted, backend)
    if has == needs == "numeric" and held.precision is not None:
        scale = held.scale or 0
        return bool(scale >= wanted.scale and held.precision - scale >= wanted.precision - wanted.scale)
    return has == needs or not has or not needs


def _family(kind: Any, backend: str) -> str:
    """Return the family of numbers, dates, times or text that a type belongs to; "" for any other type."""
    if isinstance(kind, sa.DateTime):
        zone = "with time zone" if backend == POSTGRES and kind.timezone else ""
        digits = kind.fsp if backend == MYSQL and isinstance(kind, mysql.DATETIME) else getattr(kind, "precision", None)
        return f"timestamp({_TIME_DIGITS if digits is None and backend != MYSQL else digits}) {zone}"
    if isinstance(kind, sa.Float):  # a Numeric in older versions of SQLAlchemy
        return ""
    names = {sa.Numeric: "numeric", sa.Date: "date", sa.String: "text"}
    return next((name for of, name in names.items() if isinstance(kind, of)), "")


def _plain(name: str, dialect: Dialect) -> str:
    """Return the column name: SQLAlchemy parses MySQL's CREATE TABLE, where a backtick in a name is doubled."""
    return name.replace("``", "`") if dialect.backend == MYSQL else name


def create_table(engine: sa.Engine, table: sa.Table) -> None:
    """Create `table` unless it exists, also if another run creates it concurrently."""
    for attempt in (1, 2):
        try:
            with writing(engine) as connection:
                table.create(connection, checkfirst=True)
            return
        except PipelineError:
            if attempt == 2:
                raise
