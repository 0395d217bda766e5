"""A source in memory for tests of the rooms above: tests commit to it explicitly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from headwater.errors import NotFound, NotSupported, SourceMismatch
from headwater.model.change import Change, Op, Transaction
from headwater.model.dependencies.dependency import Analysis
from headwater.model.keys.key import Span, encode_key
from headwater.model.literal import Value
from headwater.model.principal import OWNER
from headwater.model.query.query import Query
from headwater.model.table import Key, Row, Table
from headwater.sources.query import Args, ReadResult
from headwater.sources.read import BulkAddress, Chunk, Condition, Sample, SamplePoint, SourceHead
from headwater.sources.request_checks import column_of
from headwater.sources.sqlite.query.where import Predicates
from headwater.sources.write import Tx, Work, WriteResult

T = TypeVar("T")


class MemorySource:
    """Implements `Source` for following and reading tables; it runs no SQL and refuses writes."""

    def __init__(self, name: str, *tables: Table, part: int = 512) -> None:
        self.name = name
        self._part = part  # most changes that one part of a transaction carries
        self._tables = {table.name: table for table in tables}
        self._rows: dict[str, dict[bytes, Row]] = {table.name: {} for table in tables}
        self._woken = threading.Event()
        self._predicates = Predicates()
        self._lock = threading.Lock()  # guards what follows, and the rows
        self._transactions: list[Transaction] = []
        self._head = 0
        self._generation = ""
        self.beginning = 0
        self.acknowledged = 0
        self.lost = ""  # set by a test: why the history broke off

    snapshot_positions = None

    def bulk_address(self) -> BulkAddress:
        """Refuse: another process cannot read this memory."""
        raise NotSupported(f"{self.name!r} is not read in bulk", hint="Feeds of its changes are served.")

    def remedy(self, table: str) -> str:
        """Return "": changes carry whole rows."""
        return ""

    # --- the script ------------------------------------------------------------------------------------------

    def commit(self, *changes: Change, ms: int = 0) -> Transaction:
        """Commit `changes` as one transaction."""
        with self._lock:
            first = self._head + 1
            made = Transaction(str(first), changes, first=first, commit_ts_ms=ms, position=str(first))
            for change in changes:
                self._apply(change)
            self._head = made.upto
            self._transactions.append(made)
        self._woken.set()
        return made

    def _apply(self, change: Change) -> None:
        name = change.table.name
        if change.op is Op.SCHEMA_CHANGE:
            self._tables[name] = change.table
            self._rows.setdefault(name, {})
        if change.before is not None:
            del self._rows[name][_place(change.table, change.before)]
        if change.after is not None:
            self._rows[name][_place(change.table, change.after)] = change.after
        if change.op is Op.TRUNCATE:
            self._rows[name].clear()

    # --- history ---------------------------------------------------------------------------------------------

    def prove(self, *, generation: str, latest: int, read: Callable[[int], Iterator[Transaction]]) -> str:
        """Return "" if the log matches; a source that no log has followed yet accepts any new one."""
        if not self._generation and not latest:
            self._generation = generation
        if self._generation != generation:
            return "the source belongs to another log"
        return "commits were lost" if self._head < latest else ""

    def restart(self, *, generation: str, first: int) -> int:
        """See Source."""
        with self._lock:
            first = max(first, self._head + 2) if self._head else first
            self._generation, self._head, self._transactions, self.lost = generation, first - 1, [], ""
            return first

    def reopen(self) -> None:
        """See Source."""

    # --- following -------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Table]:
        """See Source."""
        return dict(self._tables)

    def head(self) -> int:
        """See Source."""
        return self._head

    def follow(self, *, after: int) -> Iterator[Transaction]:
        """See Source."""
        if self.lost:
            raise SourceMismatch(self.lost)
        with self._lock:
            waiting = [transaction for transaction in self._transactions if transaction.upto > after]
        for transaction in waiting:
            for low in range(transaction.first - 1, transaction.upto, self._part):
                yield transaction.cut(low, low + self._part)

    def wait(self, timeout: float) -> None:
        """See Source."""
        self._woken.wait(timeout)
        self._woken.clear()

    def wake(self) -> None:
        """See Source."""
        self._woken.set()

    def acknowledge(self, upto: int) -> None:
        """See Source."""
        with self._lock:
            self.acknowledged = max(self.acknowledged, upto)
            self._transactions = [found for found in self._transactions if found.upto > upto]

    # --- reading and writing ---------------------------------------------------------------------------------

    def get(self, table: str, key: Key) -> tuple[Table, Row | None, int]:
        """See Source."""
        shape = self._table(table)
        with self._lock:
            return shape, self._rows[table].get(encode_key(key, _collations(shape))), self._head

    def chunk(self, table: str, *, after: Key | None, span: Span | None, limit: int) -> Chunk:
        """See Source."""
        shape = self._table(table)
        low = b"" if after is None else encode_key(after, _collations(shape))
        with self._lock:
            found = sorted((key, row) for key, row in self._rows[table].items() if after is None or key > low)
            rows = [row for key, row in found if span is None or span.contains(key)]
            more = len(rows) > limit
            return Chunk(shape, tuple(rows[:limit]), self._head, shape.key_of(rows[limit - 1]) if more else None)

    def sample(self, table: str, size: int) -> Sample:
        """See Source. Takes rows at equal distances in key order."""
        shape = self._table(table)
        with self._lock:
            rows = sorted(self._rows[table].items())
        weights = [sum(len(v) if isinstance(v, (str, bytes)) else 8 for v in row) for _, row in rows]
        step = max(len(rows) // max(size, 1), 1)
        cuts = [(rows[low][0], weights[low : low + step]) for low in range(0, len(rows), step)]
        points = tuple(SamplePoint(place, len(some), sum(some)) for place, some in cuts)
        return Sample(shape, len(rows), sum(weights), points)

    def condition(self, table: Table, where: str) -> Condition:
        """See Source. Predicates have the meaning that they have in SQLite."""
        return self._predicates.condition(table, where)

    def order(self, table: Table, columns: Sequence[str]) -> Callable[[Key], bytes]:
        """See Source."""
        collations = [column_of(table, name).collation for name in columns]
        return lambda values: encode_key(values, collations)

    def stored(self, table: Table, columns: Sequence[str], values: Key) -> Key:
        """Return `values`: any column holds any value."""
        return values

    def stop_statements(self) -> None:
        pass

    def check_sql(self, role: str, statement: str = "", args: Args = ()) -> None:
        """See Source. Refuses nothing."""

    def release(self, reason: str) -> None:
        """See Source."""

    def read(self, sql: str, args: Args = (), *, role: str = OWNER) -> ReadResult:
        """Refuse: this source runs no SQL."""
        raise NotSupported("a source in memory runs no SQL")

    def read_head(self) -> SourceHead:
        """See Source."""
        return SourceHead(self.head(), 0)

    def peek_head(self) -> SourceHead | None:
        """See Source."""
        return self.read_head()

    def text(self, query: Query) -> str:
        """Refuse: this source runs no SQL."""
        raise NotSupported("a source in memory runs no SQL")

    def analyse(self, sql: str) -> Analysis:
        """Refuse: this source runs no SQL."""
        raise NotSupported("a source in memory runs no SQL")

    def answer(self, analysis: Analysis, args: dict[str, Value], *, guards: bool = False) -> ReadResult | None:
        """Refuse: this source runs no SQL."""
        raise NotSupported("a source in memory runs no SQL")

    def is_read_only(self, sql: str, args: Args = (), *, role: str = OWNER) -> bool:
        """Refuse: this source runs no SQL."""
        raise NotSupported("a source in memory runs no SQL")

    def write(self, work: Work[T], *, role: str = OWNER, caller: str = "") -> Future[WriteResult[T]]:
        """Refuse: tests call `commit`."""
        raise NotSupported("a source in memory is written by its script")

    def begin(self, *, read_only: bool = False, role: str = OWNER) -> Tx:
        """Refuse: tests call `commit`."""
        raise NotSupported("a source in memory is written by its script")

    def status(self) -> dict[str, Any]:
        """See Source."""
        return {"head": self._head, "tables": sorted(self._tables)}

    def finish_writes(self) -> None:
        """Do nothing: there are no writes."""

    def close(self) -> None:
        """See Source."""

    def _table(self, name: str) -> Table:
        if name not in self._tables:
            raise NotFound(f"there is no table {name!r}")
        return self._tables[name]


def _collations(table: Table) -> list[str]:
    return [table.columns[place].collation for place in table.key_places]


def _place(table: Table, row: Row) -> bytes:
    return encode_key(table.key_of(row), _collations(table))
