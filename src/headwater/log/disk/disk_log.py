"""The log on disk: one SQLite file per database, one row per block of changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Self

from msgspec.structs import replace

from headwater.errors import InvalidRequest, LogDamaged, NotFound, OffsetExpired
from headwater.log.disk.block_codec import encode
from headwater.log.disk.block_reader import Reader
from headwater.log.disk.log_writer import Writer
from headwater.log.disk.retained_blocks import RetainedBlocks
from headwater.log.disk.retention import step_end, whole
from headwater.log.disk.store import State, new_generation
from headwater.log.disk.table_ends import TableEnds, own_shares
from headwater.log.transaction_parts import BLOCK_CHANGES, first_begin, in_order, last_at, within
from headwater.model.change import Transaction


class DiskLog:
    """A `Log`, which documents the methods, in an SQLite file. Open it with `DiskLog.open`; one process writes."""

    def __init__(self, path: Path, writer: Writer | None, vfs: str | None) -> None:
        self.path = path
        self.created = writer is not None and writer.file.created
        self._reader = Reader(path, vfs)
        self._writer = writer
        self.note, self.shape = self._reader.note, self._reader.shape
        self.last_of = TableEnds(self._reader, lambda: self.latest).last
        blocks = RetainedBlocks(self._own_writer, self._reader)
        self.retain, self.blocks, self.overdue, self.merge = blocks.retain, blocks.sizes, blocks.overdue, blocks.merge

    @classmethod
    def open(
        cls, path: str | PathLike[str], *, read_only: bool = False, floor: int = 1, vfs: str | None = None
    ) -> Self:
        """Open the log at `path`, or create it (`created` is true then) with `floor` as its first offset.

        Raise LogDamaged if the file is no log, broken, or of a newer Headwater; NotFound if `read_only` finds no file.
        """
        place = Path(path)
        if read_only and not place.is_file():
            raise NotFound(f"there is no log at {place}", hint="Start the server once: it creates the log.")
        log = cls(place, None if read_only else Writer(place, floor=floor, vfs=vfs), vfs)
        try:
            state = log._now()
            if state.horizon <= state.latest:
                log.read(after=state.latest - 1)  # proves that the newest block is readable
        except BaseException:
            log.close()
            raise
        return log

    def _own_writer(self) -> Writer:
        if self._writer is None:
            raise InvalidRequest(f"the log {self.path.name} is open for reading only")
        return self._writer

    def close(self) -> None:
        """Close the file; everything that was appended is durable already."""
        self._reader.close()
        if self._writer is not None:
            self._writer.file.close()

    def inode(self) -> int:
        """Return the inode of the file; LogDamaged if it is no longer at its path."""
        return self._own_writer().inode()

    # State

    def _now(self) -> State:
        return self._reader.state() if self._writer is None else self._writer.state

    @property
    def generation(self) -> str:
        return self._now().generation

    @property
    def generation_reason(self) -> str:
        return self._now().reason

    @property
    def generation_first(self) -> int:
        return self._now().begun

    @property
    def horizon(self) -> int:
        return self._now().horizon

    @property
    def latest(self) -> int:
        """Return the newest offset, `horizon - 1` if there is none; without SQL in the process that writes."""
        return self._now().latest

    @property
    def position(self) -> str:
        return self._now().position

    @property
    def clock_ceiling(self) -> int:
        return self._now().ceiling

    @property
    def bytes(self) -> int:
        """Return the bytes of the stored blocks; 0 in a process that only reads."""
        return 0 if self._writer is None else self._writer.state.bytes

    # Reading

    def read(self, *, after: int, upto: int | None = None, limit: int | None = 512) -> list[Transaction]:
        head = _check_kept(after, self._now()).latest
        upto = min(head if upto is None else upto, head, after + (BLOCK_CHANGES if limit is None else limit))
        return self._page(after, upto, 1 if limit is None else limit) if after < upto else []

    def scan(self, *, after: int, upto: int | None = None, table: str | None = None) -> Iterator[Transaction]:
        head = _check_kept(after, self._now()).latest
        return chain.from_iterable(self._pages(after, head if upto is None else min(upto, head), table))

    def _pages(self, after: int, upto: int, table: str | None) -> Iterator[list[Transaction]]:
        while after < upto:
            if table is not None:
                found = self._reader.next_of(table, after + 1, upto)
                if found is None:
                    return
                after = found - 1
            page = self._page(after, upto, BLOCK_CHANGES if table is None else 1)
            yield page
            after = page[-1].upto

    def _page(self, after: int, upto: int, limit: int) -> list[Transaction]:
        page = within(self._reader.page(after + 1, upto, limit), after, upto)
        if not page:
            _check_kept(after, self._reader.state())  # retention may have trimmed it since
            raise LogDamaged(f"the log {self.path.name} is damaged: offset {after + 1} is missing")
        return page

    def offset_at(self, ts: int) -> int:
        """Return the last offset with a hybrid time at or below `ts`, at least `horizon - 1`; decodes one block."""
        return max(last_at(self._reader.at_time(ts), ts) or 0, self.horizon - 1)

    def first_whole(self, offset: int) -> int:
        state = self._now()
        offset = max(offset, state.horizon)
        if offset > state.latest:
            return state.latest + 1
        here = first_begin(self._reader.page(offset, offset, 1), offset)
        return here or self._reader.next_whole(offset) or state.latest + 1

    def reach(self, after: int, *, changes: int, bytes: int, table: str | None = None) -> int:
        with self._reader.sizes(after + 1) as blocks:
            shares = own_shares(blocks, self._reader, table)
            end = step_end(shares, after, latest=self.latest, changes=changes, bytes=bytes)
        return whole(end, after, begins=self.first_whole(end + 1))

    # Writing

    def append(self, parts: Iterable[Transaction], *, notes: Mapping[str, str] | None = None) -> int:
        with self._own_writer().transaction() as draft:
            for block in encode(in_order(parts, after=draft.state.latest, ts=draft.state.ts)):
                draft.insert(block)
                draft.state = replace(
                    draft.state,
                    latest=block.upto,
                    position=block.position,
                    ts=block.ts_last,
                    ceiling=max(draft.state.ceiling, block.ts_last),
                    bytes=draft.state.bytes + len(block.data),
                )
            draft.set_notes(notes or {})
        return draft.state.latest

    def raise_ceiling(self, ts: int) -> None:
        if ts > self.clock_ceiling:
            with self._own_writer().transaction() as draft:
                draft.set_meta(ceiling=ts)

    def set_notes(self, **notes: str) -> None:
        with self._own_writer().transaction() as draft:
            draft.set_notes(notes)

    def restart(self, *, first: int, reason: str, name: str = "") -> str:
        """Begin a new generation (see Log); `retain` frees the space of the old blocks, step by step."""
        if first <= self.latest:
            raise InvalidRequest(f"offset {first} is not after {self.latest}, the last of the log", hint="Start later.")
        with self._own_writer().transaction() as draft:
            # The ceiling, too: so far the newest block may be its only record.
            draft.set_meta(**new_generation(first, reason, name), ceiling=draft.state.ceiling)
            draft.state = replace(draft.state, latest=first - 1, position="")
        return draft.state.generation


def _check_kept(after: int, state: State) -> State:
    if after + 1 < state.horizon:
        raise OffsetExpired(after, state.horizon, state.latest)
    return state
