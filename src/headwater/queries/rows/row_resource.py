"""One row as a thing with an address: read, replaced, changed and deleted under the conditions of its readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headwater.database import ManagedDatabases
from headwater.errors import Conflict, InvalidRequest, NotFound, NotSupported, PreconditionFailed
from headwater.model.database_name import real_name
from headwater.model.literal import Value
from headwater.model.predicate import key_is
from headwater.model.principal import Principal
from headwater.model.suggestion import nearest
from headwater.model.table import Key, Row, Table
from headwater.queries.etag.causality import Token
from headwater.queries.etag.preconditions import Conditions, Verdict
from headwater.queries.etag.row_etag import row_etag
from headwater.queries.missing_names import no_row
from headwater.queries.rows.column_values import check_values
from headwater.queries.rows.plain_json import read_key, read_row
from headwater.queries.statements.pending_answer import Pending
from headwater.queries.statements.transactions import Transactions
from headwater.sources.write import Session

LITS = ".lits"  # behind the tag of a row that is written in `Lit`s: other bytes, another tag


class Address(msgspec.Struct, frozen=True):
    """Where a row is: its table, and the parts of its key as a URL has them."""

    db: str
    table: str
    parts: tuple[str, ...]


class Body(msgspec.Struct, frozen=True):
    """Columns as a request writes them."""

    columns: dict[str, Any]
    lits: bool = False


class Shown(msgspec.Struct, frozen=True):
    """A row as it is at `offset`, or after a write."""

    table: Table
    row: Row
    etag: str
    offset: int = 0
    created: bool = False
    causality: Token | None = None


class Deleted(msgspec.Struct, frozen=True):
    """The row is gone."""

    causality: Token | None = None


class Spot(msgspec.Struct, frozen=True):
    """An address inside a transaction: what is there now."""

    session: Session
    db: str
    table: Table
    key: Key
    row: Row | None

    @classmethod
    def look(cls, session: Session, db: str, address: Address) -> Spot:
        """The row at `address`, if there is one."""
        table = session.describe(address.table)
        key = read_key(table, address.parts)
        rows = session.select(table.name, key_is(table, key), 1)
        return cls(session, db, table, key, rows[0] if rows else None)

    def there(self) -> Row:
        """The row; NotFound."""
        if self.row is None:
            raise no_row(self.table)
        return self.row

    def demand(self, method: str, conditions: Conditions) -> None:
        """PreconditionFailed unless `conditions` let `method` go on."""
        etag = None if self.row is None else row_etag(self.db, self.table, self.row)
        also = () if etag is None else (lits_etag(etag),)
        if conditions.decide(method, etag, also=also).verdict is Verdict.GO_ON:
            return
        if etag is None:
            raise PreconditionFailed("there is no row with this key", hint="Leave If-Match out to create it.")
        raise PreconditionFailed("the row is not as the request demands", hint="Read it again, then decide.")

    def after(self, *, created: bool = False) -> Shown:
        """The row as it is now, after triggers too."""
        rows = self.session.select(self.table.name, key_is(self.table, self.key), 1)
        if not rows:
            raise self.thwarted()
        return Shown(self.table, rows[0], row_etag(self.db, self.table, rows[0]), created=created)

    def thwarted(self) -> Conflict:
        """For a write that did not come out as the one row it was meant to be."""
        return Conflict(f"a trigger of {self.table.name!r} prevents this", hint="Nothing was written.")


def lits_etag(etag: str) -> str:
    """The tag of the same row written in `Lit`s."""
    return f'{etag[:-1]}{LITS}"'


class Resources:
    """Rows by address. Conditions are judged inside the transaction that writes, so nothing can come between."""

    def __init__(self, databases: ManagedDatabases, transactions: Transactions) -> None:
        self._databases = databases
        self._transactions = transactions

    def get(self, principal: Principal, address: Address) -> Shown:
        """The row; NotFound."""
        db = real_name(address.db)
        principal.check(db, [address.table])
        source = self._databases.get(db)
        tables = source.describe()
        if address.table not in tables:
            raise NotFound(
                f"there is no table {address.table!r}", hint=nearest(address.table, principal.seen(db, tables))
            )
        table, row, offset = source.get(address.table, read_key(tables[address.table], address.parts))
        if row is None:
            raise no_row(table)
        return Shown(table, row, row_etag(db, table, row), offset)

    def put(self, principal: Principal, address: Address, body: Body, conditions: Conditions) -> Pending[Shown]:
        """Make the row exactly what `body` says: a column that it leaves out is NULL."""

        def work(spot: Spot) -> Shown:
            spot.demand("PUT", conditions)
            values = self._whole(spot, body)
            if spot.row is None:
                keyed = dict(zip(spot.table.primary_key, spot.key, strict=True)) | values
                spot.session.insert(spot.table.name, [keyed], returning=False)
                return spot.after(created=True)
            return _set(spot, values)

        return self._shown(principal, address, work)

    def patch(self, principal: Principal, address: Address, body: Body, conditions: Conditions) -> Pending[Shown]:
        """Set the columns that `body` names; NotFound."""
        if not body.columns:
            raise InvalidRequest("the body names no column", hint="Name at least one column to set.")

        def work(spot: Spot) -> Shown:
            spot.there()
            spot.demand("PATCH", conditions)
            values = check_values(spot.table, read_row(spot.table, body.columns, lits=body.lits))
            self._check_key(spot, values)
            return _set(spot, values)

        return self._shown(principal, address, work)

    def delete(self, principal: Principal, address: Address, conditions: Conditions) -> Pending[Deleted]:
        """Delete the row; NotFound."""

        def work(db: str, session: Session) -> None:
            spot = Spot.look(session, db, address)
            spot.there()
            spot.demand("DELETE", conditions)
            if not session.delete(spot.table.name, key_is(spot.table, spot.key), None).affected:
                raise spot.thwarted()

        principal.check(real_name(address.db), [address.table])
        return self._transactions.write(principal, address.db, None, work, lambda _, seen: Deleted(seen))

    def _shown(self, principal: Principal, address: Address, work: Callable[[Spot], Shown]) -> Pending[Shown]:
        def run(db: str, session: Session) -> Shown:
            return work(Spot.look(session, db, address))

        def finish(shown: Shown, seen: Token | None) -> Shown:
            return msgspec.structs.replace(shown, causality=seen)

        principal.check(real_name(address.db), [address.table])
        return self._transactions.write(principal, address.db, None, run, finish)

    def _whole(self, spot: Spot, body: Body) -> dict[str, Value]:
        """Every column that can be written: as `body` has it, else NULL. The key only where it is named."""
        table = spot.table
        computed = {column.name for column in table.visible if column.generated}
        # What a GET gave can be sent back: computed columns are among it, and are computed anew.
        named = {name: value for name, value in body.columns.items() if name not in computed}
        values = check_values(table, read_row(table, named, lits=body.lits))
        self._check_key(spot, values)
        for column in table.visible:
            if column.name in values or column.name in computed or column.name in table.primary_key:
                continue
            if not column.nullable:
                raise InvalidRequest(
                    f"column {column.name!r} of {table.name!r} cannot be NULL and is not in the body",
                    hint="A PUT holds the whole row: what it leaves out becomes NULL. PATCH sets what it names.",
                )
            values[column.name] = None
        return values

    def _check_key(self, spot: Spot, values: Mapping[str, Value]) -> None:
        """A key in the body has to be that of the address, as the database compares them."""
        for name, wanted in zip(spot.table.primary_key, spot.key, strict=True):
            if name in values and not self._equal(spot, name, values[name], wanted):
                raise InvalidRequest(
                    f"{name!r} in the body is not the key in the URL", hint="Leave it out, or send the same."
                )

    def _equal(self, spot: Spot, name: str, one: Value, other: Value) -> bool:
        if type(one) is type(other) and one == other:
            return True
        source = self._databases.get(spot.db)
        held = [source.stored(spot.table, [name], (value,)) for value in (one, other)]
        try:
            order = source.order(spot.table, [name])
        except NotSupported:  # compared as only its application knows
            return held[0] == held[1]
        return order(held[0]) == order(held[1])


def _set(spot: Spot, values: Mapping[str, Value]) -> Shown:
    """The row with `values`; a key that stays as it is is not written."""
    row, table = spot.there(), spot.table
    kept = {name for name in table.primary_key if name in values and values[name] == row[table.index[name]]}
    changed = {name: value for name, value in values.items() if name not in kept}
    if changed and not spot.session.update(table.name, key_is(table, spot.key), changed, None).affected:
        raise spot.thwarted()
    return spot.after()
