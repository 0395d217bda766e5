"""Transaction parts in order: checked, joined, cut into blocks and cut to a stretch of offsets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from headwater.errors import InvalidRequest
from headwater.model.change import Transaction, image_bytes

BLOCK_CHANGES = 512  # a seek decodes one block: small enough for well under a millisecond
BLOCK_BYTES = 8 << 20  # of large rows that are encoded at once, about


def in_order(parts: Iterable[Transaction], *, after: int, ts: int) -> Iterator[Transaction]:
    """Yield `parts`; raise InvalidRequest at the first that does not continue `after` and time `ts`."""
    open_part: Transaction | None = None
    for part in parts:
        fault = _fault(part, after, ts, open_part)
        if fault:
            raise InvalidRequest(f"transaction {part.id!r} {fault}")
        yield part
        after, ts = part.upto, part.ts
        open_part = None if part.last else part
    if open_part is not None:
        raise InvalidRequest(f"transaction {open_part.id!r} is not complete: its last part is missing")


def _fault(part: Transaction, after: int, ts: int, open_part: Transaction | None) -> str:
    if not part.changes:
        return "has a part without changes"
    if part.first != after + 1:
        return f"starts at offset {part.first}, but the log continues at {after + 1}"
    if part.ts < ts:
        return f"has the time {part.ts}, below {ts} of the one before it"
    if open_part is None:
        return f"starts in the middle, at its change {part.start}" if part.start else ""
    if part.id != open_part.id:
        return f"comes before the rest of {open_part.id!r}"
    if part.start != open_part.start + len(open_part.changes):
        return f"continues at its change {part.start}, which does not follow the part before"
    return ""


def cut_into_blocks(parts: Iterable[Transaction]) -> Iterator[list[Transaction]]:
    """Yield groups of at most BLOCK_CHANGES changes and about BLOCK_BYTES; split a transaction only if it is larger.

    Adjacent parts of one transaction are joined: only the first part of a block can start in the middle,
    and only its last part can be unfinished.
    """
    block: list[Transaction] = []
    count = weight = 0
    for part in parts:
        if block and part.start == 0 and (not part.last or count + len(part.changes) > BLOCK_CHANGES):
            yield block
            block, count, weight = [], 0, 0
        while count + len(part.changes) >= BLOCK_CHANGES:
            edge = part.first + BLOCK_CHANGES - count - 1
            _add(block, part.cut(part.first - 1, edge))
            yield block
            block, count, weight = [], 0, 0
            part = part.cut(edge, part.upto)
        if part.changes:
            _add(block, part)
            count += len(part.changes)
            weight += estimated_bytes(part)
        if weight > BLOCK_BYTES:
            yield block
            block, count, weight = [], 0, 0
    if block:
        yield block


def _add(block: list[Transaction], part: Transaction) -> None:
    if block and part.start:
        block[-1] = msgspec.structs.replace(
            block[-1], changes=block[-1].changes + part.changes, last=part.last, position=part.position
        )
    else:
        block.append(part)


def joined(parts: Iterable[Transaction]) -> list[Transaction]:
    """Join the parts of each transaction; `parts` are adjacent and in order."""
    group: list[Transaction] = []
    for part in parts:
        _add(group, part)
    return group


def within(parts: Sequence[Transaction], after: int, upto: int) -> list[Transaction]:
    """Return the changes of `parts` (adjacent, in order) in (after, upto]."""
    if not parts or upto <= after:
        return []
    if after < parts[0].first and parts[-1].upto <= upto:
        return list(parts)
    return [part.cut(after, upto) for part in parts if part.upto > after and part.first <= upto]


def first_begin(parts: Iterable[Transaction], offset: int) -> int | None:
    """Return the first offset at or above `offset` where one of `parts` begins a transaction; None if none does."""
    return next((part.first for part in parts if part.start == 0 and part.first >= offset), None)


def last_at(parts: Iterable[Transaction], ts: int) -> int | None:
    """Return the last offset among `parts` with a time at or below `ts`; None if all have later times."""
    return max((part.upto for part in parts if part.ts <= ts), default=None)


def estimated_bytes(part: Transaction) -> int:
    """Estimate the memory of `part` by its last change: measuring every row would cost more."""
    change = part.changes[-1]
    values = len(change.before or ()) + len(change.after or ())
    return len(part.changes) * (32 * values + image_bytes((change,)))
