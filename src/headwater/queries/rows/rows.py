"""The data API: get, insert, update and delete rows by key or condition, each atomically."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from headwater.database import ManagedDatabases
from headwater.errors import InvalidRequest
from headwater.model.database_name import real_name
from headwater.model.literal import Value
from headwater.model.predicate import Col, Expr, children, key_is
from headwater.model.principal import Principal
from headwater.model.table import Key, Row, Table
from headwater.queries.etag.causality import Token
from headwater.queries.etag.row_etag import demand, row_etag
from headwater.queries.missing_names import found_row, found_table
from headwater.queries.rows.column_values import check_columns, check_key, check_values, column_of
from headwater.queries.statements.pending_answer import PendingAnswer
from headwater.queries.statements.transactions import Transactions
from headwater.sources.write import Session


class TableAddress(msgspec.Struct, frozen=True):
    """A table of a database; without `db` the database of the transaction, else `main`."""

    table: str
    db: str | None = None


class FoundRow(msgspec.Struct, frozen=True):
    """One row; its tag is None if it was read inside a transaction."""

    table: Table
    row: Row
    etag: str | None = None


class StoredResult(msgspec.Struct, frozen=True):
    """The result of a write. `etag` is the new tag of the row, if the caller sent an expected tag."""

    affected: int
    last_insert_id: int = 0
    columns: tuple[str, ...] = ()
    returning: tuple[Row, ...] | None = None
    etag: str | None = None
    causality: Token | None = None


class Rows:
    """The data API of every database."""

    def __init__(self, databases: ManagedDatabases, transactions: Transactions) -> None:
        self._databases = databases
        self._transactions = transactions

    def get(
        self, principal: Principal, address: TableAddress, key: Sequence[Value], *, tx: str | None = None
    ) -> FoundRow | PendingAnswer[FoundRow]:
        """Return the row whose primary key is `key`, read inside `tx` if given; NotFound if there is none."""
        if tx is not None:
            return self._transactions.inside(
                principal, tx, address.db, lambda db, session: _select(principal, db, session, address, key)
            )
        db = real_name(address.db)
        principal.check(db, [address.table])
        source = self._databases.get(db)
        known = found_table(source.describe(), address.table, principal, db)
        table, row, _ = source.get(address.table, check_key(known, key))
        found = found_row(table, row)
        return FoundRow(table, found, row_etag(db, table, found))

    def insert(
        self,
        principal: Principal,
        address: TableAddress,
        rows: Sequence[Mapping[str, Value]],
        *,
        returning: Sequence[str] | None = None,
        tx: str | None = None,
    ) -> PendingAnswer[StoredResult]:
        """Insert all `rows`, or none on an error; return the columns `returning` of the rows as stored."""
        if not rows:
            raise InvalidRequest("`rows` is empty", hint="Send at least one row.")

        def work(_: str, session: Session) -> StoredResult:
            table = session.describe(address.table)
            columns = check_columns(table, returning or ())
            checked = [check_values(table, row) for row in rows]
            result, stored = session.insert(address.table, checked, returning=returning is not None)
            places = [table.index[name] for name in columns]
            back = None if returning is None else tuple(tuple(row[place] for place in places) for row in stored)
            return StoredResult(result.affected, result.last_insert_id, columns, back)

        return self._write(principal, address, tx, work)

    def update(
        self,
        principal: Principal,
        address: TableAddress,
        where: Expr,
        values: Mapping[str, Value],
        *,
        limit: int | None = None,
        if_match: str | None = None,
        tx: str | None = None,
    ) -> PendingAnswer[StoredResult]:
        """Set `values` on the rows that match; with `if_match`, raise Conflict unless one row with this tag does."""
        if not values:
            raise InvalidRequest("`set` is empty", hint="Send at least one column to set.")

        def work(db: str, session: Session) -> StoredResult:
            table = session.describe(address.table)
            _check_where(table, where)
            found = check_values(table, values)
            key = None if if_match is None else _tagged(session, db, table, where, if_match)
            affected = session.update(address.table, where, found, limit).affected
            tag = None if key is None or not affected else _new_tag(session, db, table, key, found)
            return StoredResult(affected, etag=tag)

        return self._write(principal, address, tx, work)

    def delete(
        self,
        principal: Principal,
        address: TableAddress,
        where: Expr,
        *,
        limit: int | None = None,
        if_match: str | None = None,
        tx: str | None = None,
    ) -> PendingAnswer[StoredResult]:
        """Delete the rows that match; with `if_match`, raise Conflict unless exactly one row with this tag does."""

        def work(db: str, session: Session) -> StoredResult:
            table = session.describe(address.table)
            _check_where(table, where)
            if if_match is not None:
                _tagged(session, db, table, where, if_match)
            return StoredResult(session.delete(address.table, where, limit).affected)

        return self._write(principal, address, tx, work)

    def _write(
        self, principal: Principal, address: TableAddress, tx: str | None, work: Callable[[str, Session], StoredResult]
    ) -> PendingAnswer[StoredResult]:
        def checked(db: str, session: Session) -> StoredResult:
            principal.check(db, [address.table])
            return work(db, session)

        def finish(stored: StoredResult, seen: Token | None) -> StoredResult:
            # Tags identify committed rows only: a write inside an open transaction has none.
            tag = stored.etag if seen is not None else None
            return msgspec.structs.replace(stored, etag=tag, causality=seen)

        return self._transactions.write(principal, address.db, tx, checked, finish)


def _select(principal: Principal, db: str, session: Session, address: TableAddress, key: Sequence[Value]) -> FoundRow:
    principal.check(db, [address.table])
    table = session.describe(address.table)
    rows = session.select(address.table, key_is(table, check_key(table, key)), 1)
    return FoundRow(table, found_row(table, rows[0] if rows else None))


def _check_where(table: Table, where: Expr) -> None:
    if isinstance(where, Col):
        if where.table not in (None, table.name):
            raise InvalidRequest(f"`where` refers to table {where.table!r}; only {table.name!r} is possible here")
        column_of(table, where.name)
    for inner in children(where):
        _check_where(table, inner)


def _tagged(session: Session, db: str, table: Table, where: Expr, expected: str) -> Key:
    rows = session.select(table.name, where, 2)
    demand(expected, db, table, rows)
    return table.key_of(rows[0])


def _new_tag(session: Session, db: str, table: Table, key: Key, values: Mapping[str, Value]) -> str | None:
    """Return the tag after the update, which may have changed the key; None if a trigger changed the key again."""
    now = tuple(values.get(name, part) for name, part in zip(table.key, key, strict=True))
    rows = session.select(table.name, key_is(table, now), 1)
    return row_etag(db, table, rows[0]) if rows else None
