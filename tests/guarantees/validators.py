"""The guarantees as validators: each receives events and collects violations. They know nothing of servers.

A *mark* names one client transaction; every row it writes carries the mark, so that its rows can be found in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from tests.guarantees.fold import Fold, RawRow

from headwater.model.change import Change, Op, Transaction
from headwater.model.row_msgpack import encode_row
from headwater.model.table import Key, Table

Rows = Callable[[Table], list[RawRow]]  # a table as the database has it


class Placed(msgspec.Struct, frozen=True):
    """One change in the log; `txn` is the first offset of its transaction."""

    offset: int
    txn: int
    ts: int
    change: Change

    @property
    def mark(self) -> str | None:
        """Return the mark in the row that the change leaves; None if it has none."""
        table, row = self.change.table, self.change.after
        found = None if row is None or "mark" not in table.index else row[table.index["mark"]]
        return found if isinstance(found, str) else None


def placed(parts: Iterable[Transaction]) -> list[Placed]:
    """Return the changes of a log one by one."""
    return [
        Placed(part.first + place, part.first - part.start, part.ts, change)
        for part in parts
        for place, change in enumerate(part.changes)
    ]


class Validator:
    """Collects the first violations; one broken history causes thousands."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def fail(self, text: str) -> None:
        """Record one violation."""
        if len(self.failures) < 10:
            self.failures.append(f"{type(self).__name__}: {text}")


class Durable(Validator):
    """Changes acknowledged to a client are there after kill -9; refused ones are not."""

    def __init__(self) -> None:
        super().__init__()
        self._acknowledged: dict[str, int] = {}
        self._refused: set[str] = set()
        self._found: dict[str, int] = {}

    def note_acknowledged(self, mark: str, changes: int) -> None:
        """Record the answer that a transaction left `changes` rows with `mark`."""
        self._acknowledged[mark] = changes

    def note_refused(self, mark: str) -> None:
        """Record the answer that a transaction was not committed."""
        self._refused.add(mark)

    def note_found(self, mark: str) -> None:
        """Record that the log, or an append-only table, has a row with `mark`."""
        self._found[mark] = self._found.get(mark, 0) + 1

    def check(self) -> None:
        """Compare the answers with the rows found."""
        for mark, changes in self._acknowledged.items():
            if self._found.get(mark, 0) != changes:
                self.fail(f"{mark} was acknowledged with {changes} changes, found are {self._found.get(mark, 0)}")
        for mark in sorted(self._refused.intersection(self._found)):
            self.fail(f"{mark} was refused, but {self._found[mark]} of its changes are there")


class Atomic(Validator):
    """Changes of one client transaction are contiguous, complete, and in one transaction of the log."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[str, int] = {}

    def note_size(self, mark: str, changes: int) -> None:
        """Require that all `changes` changes of `mark` are there if any is."""
        self._sizes[mark] = changes

    def check(self, changes: Iterable[Placed]) -> None:
        """Check the changes of a log."""
        stretches: dict[str, list[Placed]] = {}
        by_offset: dict[int, Placed] = {}
        for each in changes:
            by_offset[each.offset] = each
            if each.mark is not None:
                stretches.setdefault(each.mark, []).append(each)
        for mark, found in stretches.items():
            if len(found) != self._sizes.get(mark, len(found)):
                self.fail(f"{mark} has {len(found)} of its {self._sizes[mark]} changes")
            if len({each.txn for each in found}) > 1:
                self.fail(f"{mark} is split over transactions {sorted({each.txn for each in found})}")
            for offset in range(found[0].offset, found[-1].offset):
                between = by_offset[offset]
                if between.mark not in (mark, None):
                    self.fail(f"{between.mark} at {offset} stands inside {mark}")

    def check_parts(self, parts: Iterable[Transaction]) -> None:
        """Check that parts of one transaction follow each other and that only the last is marked as last."""
        before: Transaction | None = None
        for part in parts:
            if before is None or before.last:
                if part.start and before is not None:
                    self.fail(f"{part.first} begins at change {part.start} of its transaction")
            elif (part.id, part.start, part.ts) != (before.id, before.start + len(before.changes), before.ts):
                self.fail(f"{part.first} does not continue the transaction {before.id} that is not over")
            before = part
        if before is not None and not before.last:
            self.fail(f"the log ends inside transaction {before.id}")


class Ordered(Validator):
    """Offsets increase by one and times never decrease."""

    def check(self, changes: Iterable[Placed], *, first: int | None = None) -> None:
        """Check the changes of a log, which must begin with the offset `first`, if given."""
        before: Placed | None = None
        for each in changes:
            if before is None and first is not None and each.offset != first:
                self.fail(f"the log begins with {each.offset}, not with {first}")
            if before is not None and each.offset != before.offset + 1:
                self.fail(f"{each.offset} follows {before.offset}")
            if before is not None and each.ts < before.ts:
                self.fail(f"the time of {each.offset} is {each.ts}, below {before.ts} of the one before")
            if before is not None and each.ts == before.ts and each.txn != before.txn:
                self.fail(f"{each.offset} has the time of another transaction: {each.ts}")
            before = each


class NeverRewritten(Validator):
    """An offset keeps its content and its time forever."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[Any, ...]] = {}
        self._newest = 0

    def note_reading(self, changes: Iterable[Placed], newest: int = 0) -> None:
        """Compare changes with all earlier readings; `newest` is the log's latest offset, also known in an empty
        generation.
        """
        for each in changes:
            content = (each.ts, each.change.op, each.change.table.name, _bytes(each.change), each.change.ddl)
            if self._seen.setdefault(each.offset, content) != content:
                self.fail(f"{each.offset} was {self._seen[each.offset]} and is now {content}")
            newest = max(newest, each.offset)
        if newest < self._newest:
            self.fail(f"the log ended at {self._newest} and ends now at {newest}")
        self._newest = max(newest, self._newest)


def _bytes(change: Change) -> tuple[bytes | None, ...]:
    return tuple(None if row is None else encode_row(row) for row in (change.before, change.after))


class Answered(Validator):
    """A write answered with an offset is in the log at exactly that offset."""

    def check(self, changes: Iterable[Placed], places: Mapping[str, Mapping[str, int]]) -> None:
        """Take tables and offsets by mark: at each the transaction left its last row in the table."""
        by_offset = {each.offset: each for each in changes}
        for mark, tables in places.items():
            for table, offset in tables.items():
                found = by_offset.get(offset)
                if found is None or found.change.table.name != table or found.mark != mark:
                    self.fail(f"{mark} was said to be at {offset} of {table}, where the log has {found}")


class Constant(Validator):
    """The sum of values that are only moved between rows is the same after every transaction."""

    def check(self, changes: Sequence[Placed], name: str, column: str, held: Mapping[Key, Any]) -> None:
        """Check the sum of `column` over the rows of the table `name`, which begins with the values `held`."""
        rows, total = dict(held), sum(held.values())
        for place, each in enumerate(changes):
            table, before, after = each.change.table, each.change.before, each.change.after
            if table.name == name and before is not None:
                rows.pop(table.key_of(before), None)
            if table.name == name and after is not None:
                rows[table.key_of(after)] = after[table.index[column]]
            is_last = place + 1 == len(changes) or changes[place + 1].txn != each.txn
            if table.name == name and is_last and sum(rows.values()) != total:
                self.fail(f"after {each.offset} there is {sum(rows.values())} of {total}")


class CompleteInTheLog(Validator):
    """The log folded from its beginning gives exactly the tables; every image fits the earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self.unknown: set[str] = set()  # tables that readers were told to take a snapshot of

    def check(self, changes: Iterable[Placed], names: Iterable[str], rows: Rows) -> None:
        """Fold forwards from empty tables and compare with the tables `names`."""
        fold = Fold()
        for each in changes:
            try:
                fold.apply(each.change)
            except AssertionError as error:
                self.fail(f"offset {each.offset}: {error}")
                return
        self.unknown = set(fold.unknown)
        if set(fold.tables) != set(names):
            self.fail(f"the log knows the tables {sorted(fold.tables)}, the database has {sorted(names)}")
        for name in sorted(set(names).intersection(fold.tables) - fold.unknown):
            try:
                fold.check(name, rows(fold.tables[name]))
            except AssertionError as error:
                self.fail(str(error))

    def check_backwards(self, changes: Iterable[Placed], rows: Rows) -> None:
        """Undo the log from the current tables, where its beginning was evicted; every image must fit."""
        fold = Fold()
        for each in list(changes)[::-1]:
            table = each.change.table
            if table.name not in fold.tables:
                fold.load_raw(table, rows(table))
            try:
                fold.apply(_undone(each.change))
            except AssertionError as error:
                self.fail(f"undoing offset {each.offset}: {error}")
                return


_OPPOSITE = {Op.INSERT: Op.DELETE, Op.DELETE: Op.INSERT, Op.UPDATE: Op.UPDATE}


def _undone(change: Change) -> Change:
    return msgspec.structs.replace(change, op=_OPPOSITE[change.op], before=change.after, after=change.before)
