"""Transactions for log tests: small, varied, and the same on every run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from headwater.log.log import Log
from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Column, Row, Table

ORDERS = Table("orders", (Column("id", "i64", nullable=False), Column("note", "str")), ("id",))
ITEMS = Table("items", (Column("id", "i64"), Column("order_id", "i64"), Column("price", "f64")), ("id",))


def inserts(first: int, count: int, note: str = "new") -> tuple[Change, ...]:
    """Return `count` inserts whose ids are their offsets."""
    return tuple(Change(Op.INSERT, ORDERS, None, (first + i, note)) for i in range(count))


def transaction(first: int, count: int = 1, *, ts: int | None = None, ms: int = 0, start: int = 0) -> Transaction:
    """Return a whole transaction at `first`; its time is `first` unless given."""
    when = first if ts is None else ts
    return Transaction(f"t{first}", inserts(first, count), first, when, ms, start, True, f"p{first + count - 1}")


def transactions(sizes: Iterable[int], *, first: int = 1, ms: int = 0) -> Iterator[Transaction]:
    """Yield whole transactions of these sizes, one after another."""
    for size in sizes:
        yield transaction(first, size, ms=ms)
        first += size


def mixed(first: int, tables: Iterable[Sequence[str]]) -> Iterator[Transaction]:
    """Yield one transaction for each list of table names, with one insert into each named table."""
    shapes = {ORDERS.name: ORDERS, ITEMS.name: ITEMS}
    for names in tables:
        changes = tuple(
            Change(Op.INSERT, shapes[name], None, _row(shapes[name], first + at)) for at, name in enumerate(names)
        )
        yield Transaction(f"t{first}", changes, first, first, 0, 0, True, f"p{first + len(names) - 1}")
        first += len(names)


def _row(table: Table, number: int) -> Row:
    return (number, *[None] * (len(table.columns) - 1))


def in_parts(whole: Transaction, size: int) -> Iterator[Transaction]:
    """Yield `whole` in parts of `size` changes, as a source delivers a large one."""
    for after in range(whole.first - 1, whole.upto, size):
        yield whole.cut(after, min(after + size, whole.upto))


def fill(log: Log, sizes: Sequence[int], *, ms: int = 0) -> list[Transaction]:
    """Append one transaction of each size; return the transactions."""
    added = list(transactions(sizes, first=log.latest + 1, ms=ms))
    for part in added:
        log.append([part])
    return added


def flat(parts: Iterable[Transaction]) -> list[tuple[object, ...]]:
    """Return one entry per change with all its fields, independent of how parts are cut."""
    return [
        (part.first + i, part.start + i, part.id, part.ts, part.commit_ts_us, change)
        for part in parts
        for i, change in enumerate(part.changes)
    ]


def ids(parts: Iterable[Transaction]) -> list[int]:
    """Return the offsets that the rows themselves hold (see `inserts`)."""
    rows: list[Row | None] = [change.after for part in parts for change in part.changes]
    return [row[0] for row in rows if row is not None and isinstance(row[0], int)]
