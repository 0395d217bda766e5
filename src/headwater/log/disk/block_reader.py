"""Reads blocks, notes and shapes of a log file, from any thread, on connections other than the writer's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path

import apsw
import msgspec

from headwater.errors import LogDamaged, Unavailable
from headwater.log.disk.block_codec import decode
from headwater.log.disk.shape_store import Shapes
from headwater.log.disk.store import FORMAT, State, load_state
from headwater.log.log import BlockInfo
from headwater.model.change import Transaction
from headwater.model.table import Table

PAGE_RAW = 4 << 20  # a page of large rows ends early: a scan holds a page while its reader waits

_STORED = "first, count, raw, codec, crc, schemas, data"
_FROM_OFFSET = f"""
SELECT {_STORED} FROM block
WHERE first >= ifnull((SELECT max(first) FROM block WHERE first <= ?1), ?1) AND first <= ?2 ORDER BY first
"""
_AT_TIME = f"SELECT {_STORED} FROM block WHERE ts_first <= ? ORDER BY ts_first DESC, first DESC LIMIT 1"
_SIZES = """
SELECT first, count, bytes, raw, commit_ms_last, schemas FROM block
WHERE first >= ifnull((SELECT max(first) FROM block WHERE first <= ?1), ?1) ORDER BY first
"""
_NEXT_WHOLE = "SELECT whole FROM block WHERE first > ? AND whole IS NOT NULL ORDER BY first LIMIT 1"


class _Stored(msgspec.Struct, frozen=True, gc=False):
    first: int
    count: int
    raw: int
    codec: int
    crc: int
    tables: tuple[Table, ...]
    data: bytes


class Reader:
    """Reads a log file from any thread; each call borrows a read-only connection from a pool."""

    def __init__(self, path: Path, vfs: str | None) -> None:
        self._path, self._name, self._vfs = path, Path(path.name), vfs
        self._shapes = Shapes()
        self._idle: list[apsw.Connection] = []
        self._closed = False

    @contextmanager
    def _connection(self) -> Iterator[apsw.Connection]:
        if self._closed:
            raise Unavailable(f"the log {self._path.name} is closed")
        with FORMAT.errors(self._name):
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = FORMAT.connect(self._path, read_only=True, vfs=self._vfs)
            try:
                yield connection
            finally:
                self._give_back(connection)

    def _give_back(self, connection: apsw.Connection) -> None:
        self._idle.append(connection)
        if self._closed:
            self.close()

    def close(self) -> None:
        """Close the idle connections, and the others when their calls end; later calls raise Unavailable."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def state(self) -> State:
        """Read the state from the file."""
        with self._connection() as connection:
            return load_state(self._path, connection)

    def note(self, name: str) -> str:
        """Return a stored note, "" if unset."""
        with self._connection() as connection:
            return connection.execute("SELECT value FROM note WHERE name = ?", (name,)).get or ""

    def shape(self, name: str, version: int) -> Table | None:
        """Return the definition of table `name` at `version`, the one stored last; None if the file has none."""
        with self._connection() as connection:
            return self._shapes.find(connection, name, version)

    def page(self, offset: int, upto: int, limit: int) -> list[Transaction]:
        """Return the transactions of adjacent blocks, from the block that holds `offset` on; empty if no block does.

        About `limit` changes, fewer if they are large. They may begin before `offset` and end after `upto`.
        One statement, so one state of the file: retention and merging are seen wholly or not at all.
        """
        blocks: list[_Stored] = []
        wanted, raw = offset + limit, 0
        with self._connection() as connection:
            rows = connection.execute(_FROM_OFFSET, (offset, upto))
            for row in rows:
                block = self._stored(connection, row)
                if not block.first <= offset < block.first + block.count:
                    break
                blocks.append(block)
                offset = block.first + block.count
                raw += block.raw
                if offset >= wanted or raw >= PAGE_RAW:
                    break
            rows.close()
        return list(chain.from_iterable(map(self._decoded, blocks)))

    @contextmanager
    def sizes(self, offset: int) -> Iterator[Iterator[tuple[BlockInfo, frozenset[str]]]]:
        """Yield an iterator over the sizes and table names of the blocks, from the block that holds `offset` on."""
        with self._connection() as connection, closing(connection.execute(_SIZES, (offset,))) as rows:
            yield ((BlockInfo(*row), self._shapes.names(connection, schemas)) for *row, schemas in rows)

    def next_of(self, table: str, offset: int, upto: int) -> int | None:
        """Return the first offset in [offset, upto] whose block has changes of `table`, or is missing; else None.

        A block is missing if retention has deleted it: its changes may be of the table.
        """
        with self.sizes(offset) as blocks:
            for block, names in blocks:
                if block.upto < offset:
                    continue  # of an earlier generation
                if block.first > offset or table in names:
                    return offset
                offset = block.upto + 1
                if offset > upto:
                    return None
        return offset

    def evicted(self, table: str) -> int:
        """Return an offset at or above the table's last change in deleted blocks; 0 if they had none."""
        with self._connection() as connection:
            sql = "SELECT ifnull(max(upto), 0) FROM evicted WHERE name IN ('', ?)"
            return int(connection.execute(sql, (table,)).get)

    def at_time(self, ts: int) -> list[Transaction]:
        """Return the transactions of the last block that begins at or before `ts`; empty if there is none."""
        with self._connection() as connection:
            row = connection.execute(_AT_TIME, (ts,)).fetchone()
            block = None if row is None else self._stored(connection, row)
        return [] if block is None else self._decoded(block)

    def next_whole(self, offset: int) -> int | None:
        """Return the first offset where a transaction begins in the blocks that begin after `offset`; else None."""
        with self._connection() as connection:
            found: int | None = connection.execute(_NEXT_WHOLE, (offset,)).get
            return found

    def _stored(self, connection: apsw.Connection, row: tuple[int, int, int, int, int, str, bytes]) -> _Stored:
        first, count, raw, codec, crc, schemas, data = row
        try:
            return _Stored(first, count, raw, codec, crc, self._shapes.tables(connection, schemas), data)
        except (LookupError, ValueError) as error:
            raise LogDamaged(f"the log {self._path.name} is damaged: block {first}: {error}") from error

    def _decoded(self, block: _Stored) -> list[Transaction]:
        try:
            return decode(block.first, block.codec, block.crc, block.data, block.tables)
        except LogDamaged as error:
            raise LogDamaged(f"the log {self._path.name} is damaged: {error.message}") from error
