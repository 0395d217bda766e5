"""Rows as HTTP resources: GET, PUT, PATCH and DELETE of one row, with preconditions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headwater.database import ManagedDatabases
from headwater.errors import Conflict, InvalidRequest, NotSupported, PreconditionFailed
from headwater.model.database_name import real_name
from headwater.model.literal import Value
from headwater.model.predicate import key_is
from headwater.model.principal import Principal
from headwater.model.table import Key, Row, Table
from headwater.queries.etag.causality import Token
from headwater.queries.etag.preconditions import Conditions, Verdict
from headwater.queries.etag.row_etag import row_etag
from headwater.queries.missing_names import found_row, found_table
from headwater.queries.rows.column_values import check_values
from headwater.queries.rows.plain_json import read_key, read_row
from headwater.queries.statements.pending_answer import PendingAnswer
from headwater.queries.statements.transactions import Transactions
from headwater.sources.write import Session

LITS = ".lits"  # suffix of the tag of a row in `Lit` format, because its bytes differ from plain JSON


class Address(msgspec.Struct, frozen=True):
    """The table of a row and the parts of its key, as in a URL."""

    db: str
    table: str
    parts: tuple[str, ...]


class Body(msgspec.Struct, frozen=True):
    """The columns in the body of a request, in plain JSON or as `Lit`s."""

    columns: dict[str, Any]
    lits: bool = False


class ReadRow(msgspec.Struct, frozen=True):
    """A row as read at `offset`, or after a write."""

    table: Table
    row: Row
    etag: str
    offset: int = 0
    created: bool = False
    causality: Token | None = None


class DeleteResult(msgspec.Struct, frozen=True):
    """The result of deleting a row."""

    causality: Token | None = None


class AddressedRow(msgspec.Struct, frozen=True):
    """An address and its current row, None if there is none, inside a transaction."""

    session: Session
    db: str
    table: Table
    key: Key
    row: Row | None

    @classmethod
    def read(cls, session: Session, db: str, address: Address) -> AddressedRow:
        """Read the row at `address`."""
        table = session.describe(address.table)
        key = read_key(table, address.parts)
        rows = session.select(table.name, key_is(table, key), 1)
        return cls(session, db, table, key, rows[0] if rows else None)

    def there(self) -> Row:
        """Return the row; NotFound if there is none."""
        return found_row(self.table, self.row)

    def demand(self, method: str, conditions: Conditions) -> None:
        """Raise PreconditionFailed unless `conditions` allow `method`."""
        etag = None if self.row is None else row_etag(self.db, self.table, self.row)
        also = () if etag is None else (lits_etag(etag),)
        if conditions.decide(method, etag, also=also).verdict is Verdict.GO_ON:
            return
        if etag is None:
            raise PreconditionFailed("there is no row with this key", hint="Omit If-Match to create it.")
        raise PreconditionFailed(
            "the row does not meet the request's If-Match or If-None-Match",
            hint="Read the row again, then retry. To replace any row, leave both headers out.",
        )

    def after(self, *, created: bool = False) -> ReadRow:
        """Read the row again after the write and its triggers; Conflict if it is not there."""
        rows = self.session.select(self.table.name, key_is(self.table, self.key), 1)
        if not rows:
            raise self.prevented()
        return ReadRow(self.table, rows[0], row_etag(self.db, self.table, rows[0]), created=created)

    def prevented(self) -> Conflict:
        """Return the error for a write that did not result in the one intended row."""
        return Conflict(f"a trigger of {self.table.name!r} prevents this write", hint="Nothing was written.")


def lits_etag(etag: str) -> str:
    """Return the tag of the same row in `Lit` format."""
    return f'{etag[:-1]}{LITS}"'


class Resources:
    """Rows by address. Preconditions are checked in the transaction that writes, so no other write can intervene."""

    def __init__(self, databases: ManagedDatabases, transactions: Transactions) -> None:
        self._databases = databases
        self._transactions = transactions

    def get(self, principal: Principal, address: Address) -> ReadRow:
        """Return the row; NotFound if there is none."""
        db = real_name(address.db)
        principal.check(db, [address.table])
        source = self._databases.get(db)
        known = found_table(source.describe(), address.table, principal, db)
        table, row, offset = source.get(address.table, read_key(known, address.parts))
        found = found_row(table, row)
        return ReadRow(table, found, row_etag(db, table, found), offset)

    def put(self, principal: Principal, address: Address, body: Body, conditions: Conditions) -> PendingAnswer[ReadRow]:
        """Replace or create the row with exactly the columns in `body`; a missing column becomes NULL."""

        def work(spot: AddressedRow) -> ReadRow:
            spot.demand("PUT", conditions)
            values = self._whole(spot, body)
            if spot.row is None:
                keyed = dict(zip(spot.table.primary_key, spot.key, strict=True)) | values
                spot.session.insert(spot.table.name, [keyed], returning=False)
                return spot.after(created=True)
            return _set(spot, values)

        return self._shown(principal, address, work)

    def patch(
        self, principal: Principal, address: Address, body: Body, conditions: Conditions
    ) -> PendingAnswer[ReadRow]:
        """Set the columns in `body`; NotFound if there is no row."""
        if not body.columns:
            raise InvalidRequest("the body has no columns", hint="Send at least one column to set.")

        def work(spot: AddressedRow) -> ReadRow:
            spot.there()
            spot.demand("PATCH", conditions)
            values = check_values(spot.table, read_row(spot.table, body.columns, lits=body.lits))
            self._check_key(spot, values)
            return _set(spot, values)

        return self._shown(principal, address, work)

    def delete(self, principal: Principal, address: Address, conditions: Conditions) -> PendingAnswer[DeleteResult]:
        """Delete the row; NotFound if there is none."""

        def work(db: str, session: Session) -> None:
            spot = AddressedRow.read(session, db, address)
            spot.there()
            spot.demand("DELETE", conditions)
            if not session.delete(spot.table.name, key_is(spot.table, spot.key), None).affected:
                raise spot.prevented()

        principal.check(real_name(address.db), [address.table])
        return self._transactions.write(principal, address.db, None, work, lambda _, seen: DeleteResult(seen))

    def _shown(
        self, principal: Principal, address: Address, work: Callable[[AddressedRow], ReadRow]
    ) -> PendingAnswer[ReadRow]:
        principal.check(real_name(address.db), [address.table])
        return self._transactions.write(
            principal,
            address.db,
            None,
            lambda db, session: work(AddressedRow.read(session, db, address)),
            lambda shown, seen: msgspec.structs.replace(shown, causality=seen),
        )

    def _whole(self, spot: AddressedRow, body: Body) -> dict[str, Value]:
        """Return every writable column, with NULL for those not in `body`, and the key only if `body` has it."""
        table = spot.table
        computed = {column.name for column in table.visible if column.generated}
        # The body of a GET can be sent back: its generated columns are ignored, and computed again.
        named = {name: value for name, value in body.columns.items() if name not in computed}
        values = check_values(table, read_row(table, named, lits=body.lits))
        self._check_key(spot, values)
        for column in table.visible:
            if column.name in values or column.name in computed or column.name in table.primary_key:
                continue
            if not column.nullable:
                raise InvalidRequest(
                    f"column {column.name!r} of {table.name!r} cannot be NULL and is not in the body",
                    hint="A PUT sets missing columns to NULL: send the whole row, or use PATCH to set some columns.",
                )
            values[column.name] = None
        return values

    def _check_key(self, spot: AddressedRow, values: Mapping[str, Value]) -> None:
        """Raise InvalidRequest if the key in `values` differs from that in the URL, as the database compares them."""
        for name, wanted in zip(spot.table.primary_key, spot.key, strict=True):
            if name in values and not self._equal(spot, name, values[name], wanted):
                raise InvalidRequest(
                    f"{name!r} in the body differs from the key in the URL", hint="Omit it, or send the same value."
                )

    def _equal(self, spot: AddressedRow, name: str, one: Value, other: Value) -> bool:
        if type(one) is type(other) and one == other:
            return True
        source = self._databases.get(spot.db)
        held = [source.stored(spot.table, [name], (value,)) for value in (one, other)]
        try:
            order = source.order(spot.table, [name])
        except NotSupported:  # the application defines the collation of this column
            return held[0] == held[1]
        return order(held[0]) == order(held[1])


def _set(spot: AddressedRow, values: Mapping[str, Value]) -> ReadRow:
    """Update the row with `values` and return it; unchanged key columns are not written."""
    row, table = spot.there(), spot.table
    same_key = {name for name in table.primary_key if name in values and values[name] == row[table.index[name]]}
    changed = {name: value for name, value in values.items() if name not in same_key}
    if changed and not spot.session.update(table.name, key_is(table, spot.key), changed, None).affected:
        raise spot.prevented()
    return spot.after()
