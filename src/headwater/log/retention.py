"""Which changes a log still keeps, and which small blocks it joins. Pure decisions over block sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from headwater.log.block import MAX_RAW
from headwater.log.log import Retention
from headwater.log.parts import BLOCK_CHANGES

SLACK = 2  # a step may be so many times its size for the sake of a whole transaction


class Held(msgspec.Struct, frozen=True, gc=False):
    """A block as retention sees it."""

    first: int
    count: int
    bytes: int
    raw: int
    commit_ms_last: int

    @property
    def upto(self) -> int:
        """Offset of its last change."""
        return self.first + self.count - 1


def next_horizon(
    retention: Retention, oldest: Iterable[Held], *, horizon: int, latest: int, total: int, now_ms: int
) -> int:
    """Where the horizon goes, never back: exactly by the count, block by block for bytes and age.

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


def held_back(due: int, hold: int | None, *, horizon: int) -> int:
    """The horizon on its way to `due`, but not past `hold`, and never back."""
    return due if hold is None else max(horizon, min(due, hold))


def _over(retention: Retention, block: Held, latest: int, total: int, now_ms: int) -> bool:
    too_many = retention.bytes is not None and total > retention.bytes and block.upto < latest
    too_old = retention.age_ms is not None and block.commit_ms_last < now_ms - retention.age_ms
    return too_many or too_old


def runs(blocks: Iterable[Held]) -> Iterator[list[Held]]:
    """Adjacent blocks that fit into one, each run as long as it gets.

    The last run is left out: more may still come to it, and rewriting a block at every commit would cost
    more than it saves.
    """
    run: list[Held] = []
    count = raw = 0
    for block in blocks:
        if run and (count + block.count > BLOCK_CHANGES or raw + block.raw > MAX_RAW):
            yield run
            run, count, raw = [], 0, 0
        run.append(block)
        count, raw = count + block.count, raw + block.raw


def step_end(blocks: Iterable[Held], after: int, *, latest: int, changes: int, bytes: int) -> int:
    """The last offset of a step after `after`, by the sizes of the blocks from the one that holds `after + 1`."""
    end = after
    for block in blocks:
        per_change = max(block.raw // block.count, 1)
        room = max(bytes // per_change, 0)
        taken = min(block.upto - end, room, after + changes - end)
        end, bytes = end + taken, bytes - taken * per_change
        if end < block.upto:
            break
    return min(max(end, after + 1), latest)


def whole(end: int, after: int, *, begins: int) -> int:
    """`end` of a step, or the end of the transaction it would cut; the next one begins at `begins`."""
    return begins - 1 if begins - 1 - after <= SLACK * (end - after) else end
