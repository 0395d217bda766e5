"""The changes of one transaction that are relevant to one query instance, collected in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from headwater.feeds.query_feeds.query_instances import QueryInstance
from headwater.model.change import Change, Op, Transaction
from headwater.model.row_msgpack import encode_row
from headwater.model.table import Key, Table

MOST_KEYS = 100  # in one invalidation
MOST_KEY_BYTES = 16 << 10


class RelevantChange(NamedTuple):
    """A relevant change, its offset, and the number of the dependency that it matches."""

    part: Transaction
    offset: int
    change: Change
    dependency: int


class RelevantChanges:
    """The relevant changes of one transaction. Only the last change is kept; of the others, only the keys."""

    def __init__(self, first: RelevantChange) -> None:
        self.transaction = transaction_of(first.part)
        self.last = first
        self.keys: dict[str, dict[bytes, tuple[Table, Key]]] = {}  # by table
        self.is_cut = False  # `keys` is incomplete
        self._count = self._bytes = 0
        self.take(first)

    def take(self, one: RelevantChange) -> None:
        """Add the next relevant change, in log order."""
        self.last = one
        change = one.change
        found = self.keys.setdefault(change.table.name, {})
        if (change.before is None and change.after is None) or not change.table.key:
            self.is_cut = True  # any row may have changed, or the rows have no key
        for row in (change.before, change.after):
            if row is not None and not self.is_cut:
                self._note(found, change.table, change.table.key_of(row))

    def _note(self, found: dict[bytes, tuple[Table, Key]], table: Table, key: Key) -> None:
        written = encode_row(key)
        if written in found:
            return
        if self._count >= MOST_KEYS or self._bytes + len(written) > MOST_KEY_BYTES:
            self.is_cut = True
            return
        found[written] = table, key
        self._count += 1
        self._bytes += len(written)


def transaction_of(part: Transaction) -> int:
    """Return the first offset of the transaction that `part` belongs to."""
    return part.first - part.start


def relevant(instance: QueryInstance, part: Transaction) -> Iterator[RelevantChange]:
    """Yield the changes of `part` that are relevant to `instance`."""
    for offset, change in enumerate(part.changes, part.first):
        dependency = instance.matters(change)
        if dependency is not None:
            yield RelevantChange(part, offset, change, dependency)


def schema_changes(part: Transaction) -> int:
    """Return the offset of the last schema change in `part`; -1 if there is none."""
    found = (at for at in range(len(part.changes) - 1, -1, -1) if part.changes[at].op is Op.SCHEMA_CHANGE)
    return next((part.first + at for at in found), -1)
