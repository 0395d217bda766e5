"""Is this file still the history the log was made from? Facts in, a reason or nothing out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from headwater.model.change import Change, Op, Transaction
from headwater.model.pack import encode_row
from headwater.sources.sqlite.decode import Numbered

NEAR = 64  # how far apart the place of a change in the file and in the log may be


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


def compare(mine: Iterable[Numbered], logged: Iterable[Transaction], upto: int) -> str:
    """Compare what file and log both hold, byte for byte; the first difference is the reason.

    A logged update may be an insert here (the row it replaced is set aside elsewhere, and trimmed sooner),
    and changes of one transaction may have been put in order: then both stand in the log, near by.
    """
    window: dict[int, set[tuple[object, ...]]] = {}
    theirs = _numbered(logged)
    for offset, change in mine:
        if offset > upto:
            break
        while offset + NEAR not in window and (pair := next(theirs, None)) is not None:
            window[pair[0]] = _forms(pair[1])
        window.pop(offset - NEAR, None)
        here = _bytes(change)
        if offset in window and here not in window[offset] and not any(here in forms for forms in window.values()):
            return f"change {offset} in the file is not the one in the log"
    return ""


def _numbered(logged: Iterable[Transaction]) -> Iterator[Numbered]:
    for transaction in logged:
        yield from enumerate(transaction.changes, transaction.first)


def _forms(change: Change) -> set[tuple[object, ...]]:
    forms = {_bytes(change)}
    if change.op is Op.UPDATE:
        forms.add(_bytes(Change(Op.INSERT, change.table, None, change.after)))
    return forms


def _bytes(change: Change) -> tuple[object, ...]:
    images = tuple(None if row is None else encode_row(row) for row in (change.before, change.after))
    return (change.op, change.table.name, images, change.ddl)
