"""A log in memory, for tests: everything but durability."""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping

from headwater.errors import InvalidRequest, OffsetExpired
from headwater.log.disk.block_codec import Block, encode
from headwater.log.disk.retention import held_back, next_horizon, step_end, whole
from headwater.log.log import BlockInfo, Retention
from headwater.log.transaction_parts import BLOCK_CHANGES, first_begin, in_order, last_at, within
from headwater.model.change import Transaction


class MemoryLog:
    """Implements `Log` in memory."""

    def __init__(self, *, first: int = 1) -> None:
        self._begin(first, "created")
        self._ts = self.clock_ceiling = 0
        self._notes: dict[str, str] = {}
        self._ends: dict[str, int] = {}  # offset of the last change, by table

    def _begin(self, first: int, reason: str, name: str = "") -> None:
        self.generation, self.generation_reason = name or secrets.token_hex(8), reason
        self.generation_first = self.horizon = first
        self.latest, self.position = first - 1, ""
        self._due = first  # where the horizon would be if nothing were held
        # Grows in place and is replaced when it shrinks: a reader in another thread keeps its list.
        self._parts: list[Transaction] = []
        self._blocks: list[BlockInfo] = []

    def append(self, parts: Iterable[Transaction], *, notes: Mapping[str, str] | None = None) -> int:
        """Make `parts`, and `notes` with them, durable in one step and return the new `latest`."""
        new = list(in_order(parts, after=self.latest, ts=self._ts))
        blocks = [_held(block) for block in encode(new)]
        self._parts += new
        self._blocks += blocks
        self._ends |= {change.table.name: at for part in new for at, change in enumerate(part.changes, part.first)}
        self._notes.update(notes or {})
        if new:
            self.latest, self.position, self._ts = new[-1].upto, new[-1].position, new[-1].ts
            self.clock_ceiling = max(self.clock_ceiling, self._ts)
        return self.latest

    def read(self, *, after: int, upto: int | None = None, limit: int | None = 512) -> list[Transaction]:
        """Return the changes in (after, upto], at most `limit`, as transactions or parts; raise OffsetExpired below the
        horizon.
        """
        if after + 1 < self.horizon:
            raise OffsetExpired(after, self.horizon, self.latest)
        upto = min(self.latest if upto is None else upto, after + (BLOCK_CHANGES if limit is None else limit))
        parts = self._parts
        low = max(bisect_right(parts, after + 1, key=_first) - 1, 0)
        return within(parts[low : bisect_right(parts, upto, key=_first)], after, upto)

    def scan(self, *, after: int, upto: int | None = None, table: str | None = None) -> Iterator[Transaction]:
        """Yield every change in (after, upto], block by block; a later append does not disturb it."""
        upto = self.latest if upto is None else min(upto, self.latest)
        return iter(self.read(after=after, upto=upto, limit=self.latest))

    def offset_at(self, ts: int) -> int:
        """Return the last offset with a hybrid time at or below `ts`, at least `horizon - 1`."""
        return max(last_at(self._parts, ts) or 0, self.horizon - 1)

    def first_whole(self, offset: int) -> int:
        """Return the first retained offset at or above `offset` where a transaction begins, else `latest + 1`."""
        return first_begin(self._parts, max(offset, self.horizon)) or self.latest + 1

    def last_of(self, table: str) -> int:
        """Return the offset of the last change of `table`, also if it was evicted; 0 if it never changed."""
        return self._ends.get(table, 0)

    def reach(self, after: int, *, changes: int, bytes: int, table: str | None = None) -> int:
        """Return the end of a step after `after` of about so many changes and bytes, at least one change."""
        blocks = [(block, self._share(block, table)) for block in self._blocks if block.upto > after]
        end = step_end(blocks, after, latest=self.latest, changes=changes, bytes=bytes)
        return whole(end, after, begins=self.first_whole(end + 1))

    def _share(self, block: BlockInfo, table: str | None) -> float:
        changes = [each for part in within(self._parts, block.first - 1, block.upto) for each in part.changes]
        return sum(table in (None, each.table.name) for each in changes) / len(changes)

    def raise_ceiling(self, ts: int) -> None:
        """Promise, durably, that times up to `ts` may be given out from now on."""
        self.clock_ceiling = max(self.clock_ceiling, ts)

    def note(self, name: str) -> str:
        """Return a small durable text stored with the blocks (the source's nonce, its identity); "" if unset."""
        return self._notes.get(name, "")

    def set_notes(self, **notes: str) -> None:
        """Keep `notes` durably, all in one step."""
        self._notes.update(notes)

    def restart(self, *, first: int, reason: str, name: str = "") -> str:
        """Begin a new generation whose first offset will be `first` (> latest); drop the old blocks."""
        if first <= self.latest:
            raise InvalidRequest(f"offset {first} is not after {self.latest}, the last of the log", hint="Start later.")
        self._begin(first, reason, name)
        return self.generation

    def retain(self, retention: Retention, *, now_ms: int, hold: int | None = None) -> int:
        """Apply retention in one step; return the result that `Log.retain` defines."""
        total = sum(block.bytes for block in self._blocks)
        self._due = next_horizon(
            retention, self._blocks, horizon=self.horizon, latest=self.latest, total=total, now_ms=now_ms
        )
        self.horizon = held_back(self._due, hold, horizon=self.horizon)
        before = self._blocks
        self._blocks = [block for block in before if block.upto >= self.horizon]
        self._parts = [part for part in self._parts if part.upto >= self.horizon]
        return sum(block.count for block in before[: len(before) - len(self._blocks)])

    def blocks(self) -> list[BlockInfo]:
        """Return the blocks that are kept, the oldest first."""
        return list(self._blocks)

    def overdue(self, after: int) -> int:
        """Return the bytes of blocks after offset `after` that the last `retain` would drop without `hold`."""
        return sum(block.bytes for block in self._blocks if block.first > after and block.upto < self._due)

    def merge(self) -> int:
        """Return 0: there are no blocks to join."""
        return 0

    def close(self) -> None:
        """Do nothing: there are no files."""


def _first(part: Transaction) -> int:
    return part.first


def _held(block: Block) -> BlockInfo:
    return BlockInfo(block.first, block.count, len(block.data), block.raw, block.commit_ms_last)
