"""Decisions of retention by block sizes: the next horizon, runs of small blocks to join, ends of steps. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import msgspec

from headwater.log.disk.block_codec import MAX_RAW
from headwater.log.log import BlockInfo, Retention
from headwater.log.transaction_parts import BLOCK_CHANGES

SLACK = 2  # how many times larger a step may become, so that it ends with a whole transaction


def next_horizon(
    retention: Retention, oldest: Iterable[BlockInfo], *, horizon: int, latest: int, total: int, now_ms: int
) -> int:
    """Return the next horizon, never an earlier one: exact by the count, block by block for bytes and age.

    `oldest` are the first blocks of the log in order, `total` the bytes of all of them.
    """
    if retention.changes is not None:
        horizon = max(horizon, latest - retention.changes + 1)
    for block in oldest:
        if block.upto >= horizon and not _over(retention, block, latest, total, now_ms):
            break
        horizon = max(horizon, block.upto + 1)
        total -= block.bytes
    return horizon


class EvictionProgress(msgspec.Struct, frozen=True):
    """How close a cursor is to being evicted by bytes and by age."""

    share: float = 0.0  # of the stricter limit; from 1 on the cursor is evicted
    remaining: int | None = None  # changes until the limit by bytes; None: no such limit
    expires_at_ms: int | None = None  # when the limit by age is reached; None: there is none, or nothing is unread


class RetentionLimits:
    """The limits by bytes and age, measured by the blocks of one moment."""

    def __init__(self, retention: Retention, blocks: Sequence[BlockInfo]) -> None:
        self._retention, self._blocks = retention, blocks
        self._uptos = [block.upto for block in blocks]
        self._bytes = [*accumulate((block.bytes for block in reversed(blocks)), initial=0)][::-1]  # from each block on

    def spent(self, cursor: int, *, now_ms: int) -> EvictionProgress:
        """Return how close a reader at `cursor` is to each limit; nothing is used if all blocks are read."""
        place = bisect_right(self._uptos, cursor)
        if place == len(self._blocks):
            return EvictionProgress()
        block, retention = self._blocks[place], self._retention
        shares, remaining, expires = [0.0], None, None
        if retention.bytes is not None:
            unread, changes = self._bytes[place], self._uptos[-1] - block.first + 1
            shares.append(unread / retention.bytes)
            remaining = max(int((retention.bytes - unread) * changes / max(unread, 1)), 0)
        if retention.age_ms is not None:
            shares.append((now_ms - block.commit_ms_last) / retention.age_ms)
            expires = block.commit_ms_last + retention.age_ms
        return EvictionProgress(max(shares), remaining, expires)


def held_back(due: int, hold: int | None, *, horizon: int) -> int:
    """Return the horizon on its way to `due`, but not past `hold`, and never an earlier one."""
    return due if hold is None else max(horizon, min(due, hold))


def _over(retention: Retention, block: BlockInfo, latest: int, total: int, now_ms: int) -> bool:
    too_many = retention.bytes is not None and total > retention.bytes and block.upto < latest
    too_old = retention.age_ms is not None and block.commit_ms_last < now_ms - retention.age_ms
    return too_many or too_old


def runs(blocks: Iterable[BlockInfo]) -> Iterator[list[BlockInfo]]:
    """Yield runs of adjacent blocks that fit into one block, each run as long as possible.

    The last run is left out: it may still grow, and rewriting a block at every commit would cost more
    than it saves.
    """
    run: list[BlockInfo] = []
    count = raw = 0
    for block in blocks:
        if run and (count + block.count > BLOCK_CHANGES or raw + block.raw > MAX_RAW):
            yield run
            run, count, raw = [], 0, 0
        run.append(block)
        count, raw = count + block.count, raw + block.raw


def step_end(
    blocks: Iterable[tuple[BlockInfo, float]], after: int, *, latest: int, changes: float, bytes: float
) -> int:
    """Return the last offset of a step after `after`, by the sizes of the blocks from the one with `after + 1` on.

    Each block comes with the share of its changes that count.
    """
    end = after
    for block, share in blocks:
        per_change = share * max(block.raw // block.count, 1)
        if share:
            end += min(block.upto - end, int(bytes / per_change), int(changes / share))
        else:
            end = block.upto
        if end < block.upto:
            break
        taken = block.upto - max(after, block.first - 1)
        changes, bytes = changes - taken * share, bytes - taken * per_change
    return min(max(end, after + 1), latest)


def whole(end: int, after: int, *, begins: int) -> int:
    """Return `end`, or the end of the transaction that a step to `end` would cut, which is followed by `begins`."""
    return begins - 1 if begins - 1 - after <= SLACK * (end - after) else end
