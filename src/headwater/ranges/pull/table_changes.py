"""The changes of one table in a part of the log, as rows of before and after images of one table version, for Arrow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import TypeVar

from headwater.errors import Unavailable
from headwater.log.log import Log
from headwater.model.arrow import Images
from headwater.model.change import Change, Op, Transaction
from headwater.model.clock import ts_ms
from headwater.model.keys.key import Span
from headwater.model.per_table import PerTable
from headwater.model.table import Row, Table
from headwater.model.table_ddl import ended_names
from headwater.ranges.pull.jobs import SCHEMA_CHANGED, TABLE_DROPPED, TRUNCATED, Selection
from headwater.ranges.pull.slice_cache import Stop
from headwater.sources.read import Condition, Reader, permitted_filter

BATCH_BYTES = 4 << 20  # of one batch: jobs that wait for their turn hold batches in preparation
WEIGHED = 16  # the size of one row in so many is measured
CHECK_EVERY = 64  # parts between two checks whether the reader left
JUDGED = 1_000  # rows evaluated by a condition, which may be slow, between two checks whether the reader left
MANY = 8  # changes of one part from which processing them together is faster

T = TypeVar("T")
Fit = Callable[[Row], Row]

_table_of, _op_of, _before_of, _after_of = map(attrgetter, ("table", "op", "before", "after"))
_ALIKE = {
    Op.INSERT: (("insert",), (_after_of,)),
    Op.UPDATE: (("update_preimage", "update_postimage"), (_before_of, _after_of)),
    Op.DELETE: (("delete",), (_before_of,)),
}


def same(row: Row) -> Row:
    """Return the row unchanged, because it has the columns of the target already."""
    return row


def unfit(row: Row) -> Row:
    """Stand for rows with other key columns, which cannot be applied to rows of the target."""
    raise AssertionError("never called")


def fit_to(target: Table) -> Callable[[Table], Fit | None]:
    """Return a function from a table version to the conversion of its rows to `target`; None for other tables."""

    def make(table: Table) -> tuple[Fit | None]:
        if table.name != target.name:
            return (None,)
        if table.key != target.key:
            return (unfit,)
        if table.names == target.names:
            return (same,)
        places = [table.index.get(name) for name in target.names]
        return (lambda row: tuple([None if place is None else row[place] for place in places]),)

    found = PerTable(make)
    return lambda table: found(table)[0]


def stop_of(change: Change) -> str:
    """Return the reason why a reader of the table must stop at this schema change; "" if it may continue."""
    if change.op is Op.TRUNCATE:
        return TRUNCATED
    if change.resnapshot:
        return SCHEMA_CHANGED
    return TABLE_DROPPED if _is_end(change.table.name, change.ddl or "") else ""


def _is_end(table: str, ddl: str) -> bool:
    """Return whether `ddl` dropped or renamed `table`, or gave its name to another table; True if unclear which.

    Only the statement distinguishes these from other schema changes. A view is a reason to record the statement for
    all tables that it reads: `ddl` may end another table only.
    """
    # PostgreSQL's changes name their own table, which the text does not quote.
    altered = f"ALTER TABLE {table} "
    if f"{ddl} ".startswith(f"DROP TABLE {table} ") or ddl.startswith(f"{altered}RENAME TO "):
        return True
    if ddl.startswith((f"{altered}ADD COLUMN ", f"{altered}DROP COLUMN ", f"{altered}ALTER COLUMN ")):
        return False
    ended = ended_names(ddl)
    return ended is None or table.lower() in ended


class TransactionEnds:
    """The end offsets of transactions, also of those read in part."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._known: dict[int, int] = {}  # by the first offset of a transaction

    def of(self, part: Transaction) -> int:
        """Return the last offset of the transaction of `part`."""
        if part.last:
            return part.upto
        begin = part.first - part.start
        if begin not in self._known:
            self._known = {begin: self._log.first_whole(part.upto + 1) - 1}
        return self._known[begin]


def condition_of(reader: Reader, table: Table, pick: Selection) -> Condition | None:
    """Return the condition of `pick` on rows of `table`, None if it has none; Forbidden if the caller may not use it.

    Every reader of rows calls this with the very shape of the table that it reads, which may be gone from the database.
    """
    where = pick.where
    if where is None:
        return None
    return permitted_filter(lambda: reader.condition(table, where), is_restricted=pick.is_restricted)


def holding(condition: Condition, rows: Sequence[Row], gone: Callable[[], bool]) -> list[bool]:
    """Return whether `condition` is true for each of `rows`; raise Unavailable soon after the reader is `gone`."""
    found: list[bool] = []
    for start in range(0, len(rows), JUDGED):
        if start and gone():
            raise Unavailable("the reader of these rows left")
        found += condition.holds(rows[start : start + JUDGED])
    return found


class ChangeCollector:
    """Collects the changes of `target` that `pick` selects. `batches` adds to `stops`. Not thread-safe."""

    def __init__(self, reader: Reader, log: Log, target: Table, pick: Selection, gone: Callable[[], bool]) -> None:
        self._log, self._gone, self._table = log, gone, target.name
        self._fit, self._ends = fit_to(target), TransactionEnds(log)
        self._condition = condition_of(reader, target, pick)
        self._span = pick.span
        place, key_of = reader.order(target, target.key), target.key_of
        self._place: Callable[[Row], bytes] = lambda row: place(key_of(row))
        self._known: tuple[Table | None, Fit | None] = (None, None)  # the last table version and its conversion
        self.stops: list[Stop] = []

    def batches(self, after: int, upto: int) -> Iterator[tuple[Images, int]]:
        """Yield the changes in (after, upto] in at least one batch, each with the offset covered so far."""
        images = Images()
        weighed = weight = 0
        for number, part in enumerate(self._log.scan(after=after, upto=upto, table=self._table)):
            if number % CHECK_EVERY == 0 and self._gone():
                raise Unavailable("the reader of these changes left")
            self._take(part, images)
            if len(images.rows) - weighed >= WEIGHED:
                row_bytes = sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in images.rows[-1])
                weight += row_bytes * (len(images.rows) - weighed)
                weighed = len(images.rows)
                if weight >= BATCH_BYTES and part.upto < upto:
                    yield self._passed(images.taken()), part.upto
                    weighed = weight = 0
        yield self._passed(images.taken()), upto

    def _take(self, part: Transaction, images: Images) -> None:
        """Add the images of one part."""
        before = len(images.rows)
        if len(part.changes) < MANY or not self._take_alike(part, images):
            self._take_each(part, images)
        if added := len(images.rows) - before:
            images.versions += [self._ends.of(part)] * added
            images.stamps += [part.commit_ts_ms or ts_ms(part.ts)] * added
            images.transactions += [part.id] * added

    def _take_alike(self, part: Transaction, images: Images) -> bool:
        """Add changes that all have one op, all images and the target's columns; return False if they do not."""
        changes = part.changes
        table, op, count = changes[0].table, changes[0].op, len(changes)
        if list(map(_table_of, changes)).count(table) < count:
            return False
        if self._fit(table) is not same or op not in _ALIKE or list(map(_op_of, changes)).count(op) < count:
            return False
        words, sides = _ALIKE[op]
        rows = _in_turn([map(side, changes) for side in sides])
        if None in rows:
            return False  # an update without a before image
        images.rows += rows
        images.words += words * count
        places = range(part.first, part.first + count)
        images.offsets += _in_turn([places] * len(sides))
        return True

    def _take_each(self, part: Transaction, images: Images) -> None:
        """Add the changes one by one. This loop is hot: it avoids repeated lookups."""
        rows, words, offsets = images.rows, images.words, images.offsets
        table, fit = self._known
        for offset, change in enumerate(part.changes, part.first):
            if change.table is not table:
                table = change.table
                fit = self._fit(table)
                self._known = (table, fit)
            if fit is None:
                continue
            op = change.op
            if op > Op.DELETE:
                if reason := stop_of(change):
                    self.stops.append((offset, reason))
            elif fit is unfit:
                self.stops.append((offset, SCHEMA_CHANGED))
            else:
                if change.before is not None:
                    rows.append(fit(change.before))
                    words.append("delete" if op == Op.DELETE else "update_preimage")
                    offsets.append(offset)
                if change.after is not None:
                    rows.append(fit(change.after))
                    words.append("insert" if op == Op.INSERT else "update_postimage")
                    offsets.append(offset)

    def _passed(self, images: Images) -> Images:
        if self._span != Span():
            images.narrow([self._span.contains(self._place(row)) for row in images.rows])
        if self._condition is not None:
            images.narrow(holding(self._condition, images.rows, self._gone))
        return images


def _in_turn(lists: Sequence[Iterable[T]]) -> list[T]:
    """Interleave the lists: the first of each, then the second of each, and so on."""
    return list(lists[0] if len(lists) == 1 else chain.from_iterable(zip(*lists, strict=True)))
