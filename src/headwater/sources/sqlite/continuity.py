"""Is this file still the history the log was made from? Facts in, a reason or nothing out."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from headwater.model.change import Change, Transaction
from headwater.model.pack import encode_row
from headwater.sources.sqlite.decode import Numbered


class Facts(msgspec.Struct, frozen=True):
    """What the file says of itself, and what the log remembers of it."""

    file_generation: str
    log_generation: str
    file_nonce: str
    log_nonces: tuple[str, ...]  # the last move that is known to be done, and the one that may be
    head: int  # newest offset in the file
    latest: int  # newest offset in the log


def judge(facts: Facts) -> str:
    """Why continuity cannot be proven from the facts alone; "" if nothing speaks against it."""
    if facts.file_generation != facts.log_generation:
        return "the file belongs to another log, or its log was lost"
    if facts.file_nonce not in facts.log_nonces:
        return "the file is an older copy of itself: it misses moves that were made"
    if facts.head < facts.latest:
        return f"the file ends at change {facts.head}, the log at {facts.latest}: commits were lost"
    return ""


def compare(mine: list[Numbered], logged: Iterator[Transaction], upto: int) -> str:
    """Compare what file and log both hold, byte for byte; the first difference is the reason."""
    theirs = {
        transaction.first + place: change for transaction in logged for place, change in enumerate(transaction.changes)
    }
    for offset, change in mine:
        other = theirs.get(offset)
        if offset <= upto and other is not None and _bytes(change) != _bytes(other):
            return f"change {offset} in the file is not the one in the log"
    return ""


def _bytes(change: Change) -> tuple[object, ...]:
    images = tuple(None if row is None else encode_row(row) for row in (change.before, change.after))
    return (change.op, change.table.name, images, change.ddl)
