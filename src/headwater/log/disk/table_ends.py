"""The changes of one table in a log file, found by the headers of the blocks: where they end, and their share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from headwater.log.disk.block_reader import Reader
from headwater.log.log import BlockInfo

COUNTED = 64  # blocks of several tables whose changes `own_shares` counts; for later ones it takes their mean share


class TableEnds:
    """Finds the last change of each table. Reads each header once, and decodes one block per table. Thread-safe."""

    def __init__(self, reader: Reader, latest: Callable[[], int]) -> None:
        self._reader, self._latest, self._lock = reader, latest, threading.Lock()
        self._read_upto = 0  # headers of the blocks up to this offset are read
        self._blocks: dict[str, int] = {}  # by table: the last offset of the newest block with changes of it
        self._ends: dict[str, tuple[int, int]] = {}  # by table: that offset, and the offset of the last change

    def last(self, table: str) -> int:
        """Return the offset of the last change of `table` (see Log.last_of)."""
        with self._lock:
            self._read_headers()
            block = self._blocks.get(table)
            if block is None:
                return self._reader.evicted(table)
            known, end = self._ends.get(table, (0, 0))
            if known != block:
                end = self._last_before(block, table)
                self._ends[table] = (block, end)
            return end

    def _read_headers(self) -> None:
        if self._read_upto >= self._latest():
            return
        with self._reader.sizes(self._read_upto + 1) as blocks:
            for block, names in blocks:
                self._read_upto = max(self._read_upto, block.upto)
                for name in names:
                    self._blocks[name] = block.upto

    def _last_before(self, offset: int, table: str) -> int:
        """Return the offset of the last change of `table` in the block that holds `offset`, or in an earlier block.

        The block had such a change when its header was read. Since then it may have been joined with its neighbours,
        and cut elsewhere.
        """
        while parts := self._reader.page(offset, offset, 1):
            for part in reversed(parts):
                for place in range(len(part.changes) - 1, -1, -1):
                    if part.changes[place].table.name == table:
                        return part.first + place
            offset = parts[0].first - 1
        return self._reader.evicted(table)  # the blocks were deleted


def own_shares(
    blocks: Iterable[tuple[BlockInfo, frozenset[str]]], reader: Reader, table: str | None
) -> Iterator[tuple[BlockInfo, float]]:
    """Yield each block with the share of its changes that are of `table`; None means all tables."""
    counted: list[float] = []
    for block, names in blocks:
        if table is None or names == {table}:
            yield block, 1.0
        elif table not in names:
            yield block, 0.0
        else:
            if len(counted) < COUNTED:
                changes = [each for part in reader.page(block.first, block.upto, 1) for each in part.changes]
                own = sum(each.table.name == table for each in changes)
                counted.append(own / max(len(changes), 1))
            yield block, sum(counted) / len(counted) if len(counted) == COUNTED else counted[-1]
