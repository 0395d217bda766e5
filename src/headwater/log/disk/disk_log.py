"""The log on disk: one SQLite file per database, one row per block of changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from os import PathLike
from pathlib import Path

import apsw
from msgspec.structs import replace

from headwater.errors import InvalidRequest, LogDamaged, OffsetExpired, Unavailable
from headwater.log.disk.block_codec import Block, encode, encode_group
from headwater.log.disk.block_reader import Reader
from headwater.log.disk.block_sizes import block_of, blocks_after, bytes_before
from headwater.log.disk.retention import held_back, next_horizon, runs, step_end, whole
from headwater.log.disk.shape_store import Shapes
from headwater.log.disk.store import (
    State,
    load_state,
    new_generation,
    open_writer,
    require_file,
    set_meta,
    storage_errors,
)
from headwater.log.log import Held, Retention
from headwater.log.transaction_parts import BLOCK_CHANGES, first_begin, in_order, joined, last_at, within
from headwater.model.change import Transaction
from headwater.model.table import Table

TRIM_STEP = 256  # blocks freed by one `retain`: a few milliseconds of the writer's time
MERGE_LOOK = 2 * BLOCK_CHANGES  # blocks looked at together by `merge`: more than one run ever has

_INSERT = "INSERT INTO block VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"

_MAGIC = b"SQLite format 3\0"
AGAIN = "Start again: a new generation begins, with offsets beyond all that were given out."


class DiskLog:
    """See `Log`. Open it with `DiskLog.open`; one process writes, any number read."""

    def __init__(self, path: Path, vfs: str | None) -> None:
        self.path = path
        self.created = False
        self._reader = Reader(path, vfs)
        self._shapes = Shapes()
        self._lock = threading.RLock()  # held by whoever writes; readers never take it
        self._writer: apsw.Connection | None = None
        self._data_version = 0
        self._due = 0  # where the horizon would be if nothing were held
        self._inode = 0
        self._state: State  # replaced whole after each commit: a reader sees the old or the new one

    @classmethod
    def open(
        cls, path: str | PathLike[str], *, read_only: bool = False, floor: int = 1, vfs: str | None = None
    ) -> DiskLog:
        """Open the log at `path`, or create it (`created` tells) with `floor` as its first offset.

        LogDamaged when the file is not a log, is from a newer Headwater, or is broken.
        """
        log = cls(Path(path), vfs)
        try:
            with storage_errors(log.path):
                log._open_to_read() if read_only else log._open_to_write(floor, vfs)
                log._check_newest()
        except BaseException:
            log.close()
            raise
        return log

    def _open_to_read(self) -> None:
        require_file(self.path)
        self._state = self._reader.state()

    def _open_to_write(self, floor: int, vfs: str | None) -> None:
        self._writer, self.created = open_writer(self.path, floor=max(floor, 1), vfs=vfs)
        self._data_version = self._writer.pragma("data_version")
        self._inode = self.path.stat().st_ino
        total = self._writer.execute("SELECT ifnull(sum(bytes), 0) FROM block").get
        self._state = replace(load_state(self.path, self._writer), bytes=total)

    def _check_newest(self) -> None:
        if self._state.horizon <= self._state.latest:
            self.read(after=self._state.latest - 1)

    def close(self) -> None:
        """See Log."""
        self._reader.close()
        with self._lock, storage_errors(self.path.name):
            if self._writer is not None:
                self._writer.close()

    # Where it stands

    def _now(self) -> State:
        return self._reader.state() if self._writer is None else self._state

    @property
    def generation(self) -> str:
        """See Log."""
        return self._now().generation

    @property
    def generation_reason(self) -> str:
        """See Log."""
        return self._now().reason

    @property
    def generation_first(self) -> int:
        """See Log."""
        return self._now().begun

    @property
    def horizon(self) -> int:
        """See Log."""
        return self._now().horizon

    @property
    def latest(self) -> int:
        """See Log. No SQL in the process that writes."""
        return self._now().latest

    @property
    def position(self) -> str:
        """See Log."""
        return self._now().position

    @property
    def clock_ceiling(self) -> int:
        """See Log."""
        return self._now().ceiling

    @property
    def bytes(self) -> int:
        """Bytes of the stored blocks; 0 in a process that only reads."""
        return self._state.bytes

    def note(self, name: str) -> str:
        """See Log."""
        return self._reader.note(name)

    def shape(self, name: str, version: int) -> Table | None:
        """A table as it was at `version`, told by the newest change that has it; None if none does."""
        return self._reader.shape(name, version)

    # Reading

    def read(self, *, after: int, upto: int | None = None, limit: int | None = 512) -> list[Transaction]:
        """See Log."""
        head = self._head_for(after)
        upto = min(head if upto is None else upto, head, after + (BLOCK_CHANGES if limit is None else limit))
        return self._page(after, upto, 1 if limit is None else limit) if after < upto else []

    def scan(self, *, after: int, upto: int | None = None) -> Iterator[Transaction]:
        """See Log."""
        head = self._head_for(after)
        return chain.from_iterable(self._pages(after, head if upto is None else min(upto, head)))

    def _head_for(self, after: int) -> int:
        """The newest offset; OffsetExpired when what follows `after` is gone."""
        return _check_kept(after, self._now()).latest

    def _pages(self, after: int, upto: int) -> Iterator[list[Transaction]]:
        while after < upto:
            page = self._page(after, upto, BLOCK_CHANGES)
            yield page
            after = page[-1].upto

    def _page(self, after: int, upto: int, limit: int) -> list[Transaction]:
        page = within(self._reader.page(after + 1, upto, limit), after, upto)
        if not page:
            _check_kept(after, self._reader.state())  # retention may have passed by since we looked
            raise LogDamaged(f"the log {self.path.name} is damaged: offset {after + 1} is missing")
        return page

    def offset_at(self, ts: int) -> int:
        """See Log. One index lookup and one block."""
        return max(last_at(self._reader.at_time(ts), ts) or 0, self.horizon - 1)

    def first_whole(self, offset: int) -> int:
        """See Log."""
        state = self._now()
        offset = max(offset, state.horizon)
        if offset > state.latest:
            return state.latest + 1
        here = first_begin(self._reader.page(offset, offset, 1), offset)
        return here or self._reader.next_whole(offset) or state.latest + 1

    def reach(self, after: int, *, changes: int, bytes: int) -> int:
        """See Log."""
        with self._reader.sizes(after + 1) as blocks:
            end = step_end(blocks, after, latest=self.latest, changes=changes, bytes=bytes)
        return whole(end, after, begins=self.first_whole(end + 1))

    # Writing

    def _write(self, work: Callable[[apsw.Connection, State], State]) -> State:
        """Run `work` in one transaction; the state it returns holds once that is durable."""
        with self._lock, storage_errors(self.path.name):
            connection = self._own_writer()
            connection.execute("BEGIN IMMEDIATE")
            try:
                self._check_alone(connection)
                state = work(connection, self._state)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                self._shapes.forget_numbers()
                raise
            self._state = state
            return state

    def _own_writer(self) -> apsw.Connection:
        if self._writer is None:
            raise InvalidRequest(f"the log {self.path.name} is open for reading only")
        if self._writer.in_transaction:
            raise InvalidRequest("a log cannot be written to from inside the iterable it appends")
        return self._writer

    def _check_alone(self, connection: apsw.Connection) -> None:
        if not self.path.exists() or self.path.stat().st_ino != self._inode:
            raise LogDamaged(f"the log {self.path.name} was removed or replaced under the server", hint=AGAIN)
        with self.path.open("rb") as file:  # SQLite reads the head from its cache, and would go on for long
            if file.read(len(_MAGIC)) not in (_MAGIC, b""):  # empty: a new log is still in its journal
                raise LogDamaged(f"the log {self.path.name} was overwritten under the server", hint=AGAIN)
        version = connection.pragma("data_version")
        if version == self._data_version:
            return
        mine = self._state
        if replace(load_state(self.path, connection), bytes=mine.bytes, merged=mine.merged) != mine:
            hint = "One process owns a log. Stop the other server, then start this one again."
            raise Unavailable(f"another process writes to the log {self.path.name}", hint=hint)
        self._data_version = version

    def append(self, parts: Iterable[Transaction], *, notes: Mapping[str, str] | None = None) -> int:
        """See Log."""

        def work(connection: apsw.Connection, state: State) -> State:
            for block in encode(in_order(parts, after=state.latest, ts=state.ts)):
                self._insert(connection, block)
                state = _with_block(state, block)
            _store_notes(connection, notes or {})
            return state

        return self._write(work).latest

    def _insert(self, connection: apsw.Connection, block: Block) -> None:
        numbers = self._shapes.numbers(connection, block.tables)
        connection.execute(
            _INSERT,
            (
                block.first,
                block.count,
                block.ts_first,
                block.ts_last,
                block.commit_ms_last,
                block.position,
                block.id_first,
                block.id_last,
                block.whole,
                block.ends,
                numbers,
                len(block.data),
                block.raw,
                block.codec,
                block.crc,
                block.data,
            ),
        )

    def raise_ceiling(self, ts: int) -> None:
        """See Log."""
        if ts > self.clock_ceiling:
            self._set_meta(ceiling=ts)

    def _set_meta(self, **entries: int | str) -> State:
        def work(connection: apsw.Connection, state: State) -> State:
            set_meta(connection, **entries)
            return replace(state, **entries)

        return self._write(work)

    def set_notes(self, **notes: str) -> None:
        """See Log."""

        def work(connection: apsw.Connection, state: State) -> State:
            _store_notes(connection, notes)
            return state

        self._write(work)

    def restart(self, *, first: int, reason: str, name: str = "") -> str:
        """See Log. The space of the old blocks is freed by `retain`, step by step."""
        if first <= self.latest:
            raise InvalidRequest(f"a new generation starts after {self.latest}, not at {first}")

        def work(connection: apsw.Connection, state: State) -> State:
            entries = new_generation(first, reason, name)
            set_meta(connection, **entries, ceiling=state.ceiling)  # so far also held by the newest block
            return replace(state, **entries, latest=first - 1, position="")

        return self._write(work).generation

    def retain(self, retention: Retention, *, now_ms: int, hold: int | None = None) -> int:
        """See Log."""
        with self._lock, storage_errors(self.path.name):
            state = self._state
            unheld = state.horizon if hold is None else max(self._due, state.horizon)
            self._due = self._next_due(retention, now_ms, unheld)
            horizon = held_back(self._due, hold, horizon=state.horizon)
            oldest = blocks_after(self._own_writer(), -1, TRIM_STEP)
            # The newest block stays even when no change of it does: it holds position and time.
            gone = [block for block in oldest if block.upto < min(horizon, state.latest)]
            if horizon > state.horizon or gone:
                self._trim(horizon, gone)
            return sum(block.count for block in gone)

    def _next_due(self, retention: Retention, now_ms: int, due: int) -> int:
        """Where the horizon would go from `due`, looking at a bounded number of blocks."""
        connection, state = self._own_writer(), self._state
        first = block_of(connection, due) if due > state.horizon else -1
        total = state.bytes - bytes_before(connection, first)
        oldest = blocks_after(connection, first - 1, TRIM_STEP)
        return next_horizon(retention, oldest, horizon=due, latest=state.latest, total=total, now_ms=now_ms)

    def blocks(self) -> list[Held]:
        """See Log."""
        with self._lock, storage_errors(self.path.name):
            return blocks_after(self._own_writer(), -1, -1)

    def overdue(self, after: int) -> int:
        """See Log."""
        with self._lock, storage_errors(self.path.name):
            connection = self._own_writer()
            due, start = block_of(connection, self._due), block_of(connection, after + 1)
            return max(bytes_before(connection, due) - bytes_before(connection, start), 0)

    def _trim(self, horizon: int, gone: list[Held]) -> None:
        def work(connection: apsw.Connection, state: State) -> State:
            set_meta(connection, horizon=horizon)
            if gone:
                connection.execute("DELETE FROM block WHERE first <= ?", (gone[-1].first,))
            return replace(state, horizon=horizon, bytes=state.bytes - sum(block.bytes for block in gone))

        self._write(work)

    def merge(self) -> int:
        """See Log."""
        with self._lock, storage_errors(self.path.name):
            connection = self._own_writer()
            while True:
                after = max(self._state.merged, self._state.horizon - 1)
                blocks = blocks_after(connection, after, MERGE_LOOK)
                for run in runs(blocks):
                    if len(run) > 1:
                        return self._join(run)
                    # In memory only: a block that stands alone is not worth a commit.
                    self._state = replace(self._state, merged=run[-1].upto)
                if len(blocks) < MERGE_LOOK:
                    return 0

    def _join(self, run: list[Held]) -> int:
        parts: list[Transaction] = []
        while not parts or parts[-1].upto < run[-1].upto:
            offset = parts[-1].upto + 1 if parts else run[0].first
            parts += self._reader.page(offset, run[-1].upto, BLOCK_CHANGES)
        blocks = list(encode_group(joined(parts)))

        def work(connection: apsw.Connection, state: State) -> State:
            connection.execute("DELETE FROM block WHERE first BETWEEN ? AND ?", (run[0].first, run[-1].first))
            for block in blocks:
                self._insert(connection, block)
            set_meta(connection, merged=run[-1].upto)
            change = sum(len(block.data) for block in blocks) - sum(block.bytes for block in run)
            return replace(state, merged=run[-1].upto, bytes=state.bytes + change)

        self._write(work)
        return len(run) - len(blocks)


def _check_kept(after: int, state: State) -> State:
    if after + 1 < state.horizon:
        raise OffsetExpired(after, state.horizon, state.latest)
    return state


def _with_block(state: State, block: Block) -> State:
    return replace(
        state,
        latest=block.upto,
        position=block.position,
        ts=block.ts_last,
        ceiling=max(state.ceiling, block.ts_last),
        bytes=state.bytes + len(block.data),
    )


def _store_notes(connection: apsw.Connection, notes: Mapping[str, str]) -> None:
    connection.executemany("INSERT OR REPLACE INTO note VALUES (?, ?)", notes.items())
