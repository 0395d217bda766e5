"""Retention of a log file: deletes the oldest blocks and joins small ones, without reading the others."""

from __future__ import annotations

from collections.abc import Callable

import apsw
from msgspec.structs import replace

from headwater.log.disk.block_codec import encode_group
from headwater.log.disk.block_reader import Reader
from headwater.log.disk.log_writer import Writer
from headwater.log.disk.retention import held_back, next_horizon, runs
from headwater.log.log import BlockInfo, Retention
from headwater.log.transaction_parts import BLOCK_CHANGES, joined
from headwater.model.change import Transaction

TRIM_STEP = 256  # blocks freed by one `retain`: a few milliseconds of the writer's time
MERGE_STEP = 2 * BLOCK_CHANGES  # blocks that `merge` reads together: more than one run ever has

_BLOCKS = "SELECT first, count, bytes, raw, commit_ms_last FROM block WHERE first > ? ORDER BY first LIMIT ?"
_BLOCK_OF = "SELECT max(first) FROM block WHERE first <= ?"
# By the index alone: the blocks themselves may be gigabytes.
_BYTES_BEFORE = """
SELECT ifnull(sum(bytes), 0) FROM block INDEXED BY block_time
WHERE ts_first <= (SELECT ts_first FROM block WHERE first = ?1) AND first < ?1
"""


class RetainedBlocks:
    """Trims and joins the blocks of one log; see Log. Every call needs `writer()`, which raises if it is read-only."""

    def __init__(self, writer: Callable[[], Writer], reader: Reader) -> None:
        self._writer, self._reader = writer, reader
        self._due = 0  # the horizon that retention would have without `hold`

    def sizes(self) -> list[BlockInfo]:
        """Return the sizes of the stored blocks, the oldest first."""
        with self._writer().file.connection() as connection:
            return _blocks_after(connection, -1, -1)

    def overdue(self, after: int) -> int:
        with self._writer().file.connection() as connection:
            due, start = _block_of(connection, self._due), _block_of(connection, after + 1)
            return max(_bytes_before(connection, due) - _bytes_before(connection, start), 0)

    def retain(self, retention: Retention, *, now_ms: int, hold: int | None = None) -> int:
        writer = self._writer()
        with writer.file.connection() as connection:
            state = writer.state
            due = state.horizon if hold is None else max(self._due, state.horizon)
            first = _block_of(connection, due) if due > state.horizon else -1
            total = state.bytes - _bytes_before(connection, first)
            oldest = _blocks_after(connection, first - 1, TRIM_STEP)
            self._due = next_horizon(retention, oldest, horizon=due, latest=state.latest, total=total, now_ms=now_ms)
            horizon = held_back(self._due, hold, horizon=state.horizon)
            oldest = _blocks_after(connection, -1, TRIM_STEP)
            # The newest block stays even when no change of it does: it holds position and time.
            gone = [block for block in oldest if block.upto < min(horizon, state.latest)]
            if horizon > state.horizon or gone:
                with writer.transaction() as draft:
                    draft.set_meta(horizon=horizon)
                    if gone:
                        draft.note_evicted(gone[-1].first)
                        connection.execute("DELETE FROM block WHERE first <= ?", (gone[-1].first,))
                    draft.state = replace(draft.state, bytes=state.bytes - sum(block.bytes for block in gone))
            return sum(block.count for block in gone)

    def merge(self) -> int:
        writer = self._writer()
        with writer.file.connection() as connection:
            while True:
                after = max(writer.state.merged, writer.state.horizon - 1)
                blocks = _blocks_after(connection, after, MERGE_STEP)
                for run in runs(blocks):
                    if len(run) > 1:
                        return self._join(writer, run)
                    # In memory only: a block without a small neighbour is not worth a commit.
                    writer.state = replace(writer.state, merged=run[-1].upto)
                if len(blocks) < MERGE_STEP:
                    return 0

    def _join(self, writer: Writer, run: list[BlockInfo]) -> int:
        parts: list[Transaction] = []
        while not parts or parts[-1].upto < run[-1].upto:
            offset = parts[-1].upto + 1 if parts else run[0].first
            parts += self._reader.page(offset, run[-1].upto, BLOCK_CHANGES)
        blocks = list(encode_group(joined(parts)))
        change = sum(len(block.data) for block in blocks) - sum(block.bytes for block in run)
        with writer.transaction() as draft:
            bounds = (run[0].first, run[-1].first)
            draft.connection.execute("DELETE FROM block WHERE first BETWEEN ? AND ?", bounds)
            for block in blocks:
                draft.insert(block)
            draft.set_meta(merged=run[-1].upto)
            draft.state = replace(draft.state, bytes=draft.state.bytes + change)
        return len(run) - len(blocks)


def _blocks_after(connection: apsw.Connection, first: int, limit: int) -> list[BlockInfo]:
    """Return at most `limit` blocks that begin after `first`."""
    return [BlockInfo(*row) for row in connection.execute(_BLOCKS, (first, limit))]


def _block_of(connection: apsw.Connection, offset: int) -> int:
    """Return the first offset of the block that holds `offset`, else of the last block before it; -1 without any."""
    found: int | None = connection.execute(_BLOCK_OF, (offset,)).get
    return -1 if found is None else found


def _bytes_before(connection: apsw.Connection, first: int) -> int:
    """Return the bytes of all blocks before the one that begins at `first`; 0 if none does."""
    return int(connection.execute(_BYTES_BEFORE, (first,)).get)
