"""Gathering: what of one transaction matters to one question, in bounded memory, until the transaction ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headwater.feeds.query_feeds.query_instances import Question
from headwater.model.change import Change, Op, Transaction
from headwater.model.row_msgpack import encode_row
from headwater.model.table import Key, Table

MOST_KEYS = 100  # of one invalidation
MOST_KEY_BYTES = 16 << 10


class Relevant(NamedTuple):
    """A change that matters: where it stands, and to which place of the query."""

    part: Transaction
    offset: int
    change: Change
    place: int


class Gathering:
    """The changes of one transaction that matter to one question. Of all but the last only the keys are kept."""

    def __init__(self, first: Relevant) -> None:
        self.transaction = transaction_of(first.part)
        self.last = first
        self.keys: dict[str, dict[bytes, tuple[Table, Key]]] = {}  # by table
        self.is_cut = False  # there are keys that are not among them
        self._count = self._bytes = 0
        self.take(first)

    def take(self, one: Relevant) -> None:
        """The next one, in the order of the log."""
        self.last = one
        change = one.change
        found = self.keys.setdefault(change.table.name, {})
        if (change.before is None and change.after is None) or not change.table.key:
            self.is_cut = True  # any row may be another, or nothing tells which one is
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
    """The first offset of the transaction that `part` belongs to."""
    return part.first - part.start


def relevant(question: Question, part: Transaction) -> Iterator[Relevant]:
    """What of `part` matters to `question`."""
    for offset, change in enumerate(part.changes, part.first):
        place = question.matters(change)
        if place is not None:
            yield Relevant(part, offset, change, place)


def gathered(question: Question, parts: Sequence[Transaction]) -> Gathering | None:
    """What of one transaction matters; None when nothing does."""
    found: Gathering | None = None
    for part in parts:
        for one in relevant(question, part):
            if found is None:
                found = Gathering(one)
            else:
                found.take(one)
    return found


def schema_changes(part: Transaction) -> int:
    """The offset of its last change of the schema; -1 without any."""
    places = (at for at in range(len(part.changes) - 1, -1, -1) if part.changes[at].op is Op.SCHEMA_CHANGE)
    return next((part.first + at for at in places), -1)
