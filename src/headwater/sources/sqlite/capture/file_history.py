"""Check that a file is still the history from which the log was made. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headwater.model.change import Change, Op, Transaction
from headwater.model.row_msgpack import encode_row
from headwater.sources.sqlite.capture.change_decoder import Numbered


class FileFacts(msgspec.Struct, frozen=True):
    """State recorded in the file, and state that the log recorded about the file."""

    file_generation: str
    log_generation: str
    file_nonce: str
    log_nonces: tuple[str, ...]  # nonce of the last completed trim, then of a trim that may have completed
    head: int  # newest offset in the file
    latest: int  # newest offset in the log


def judge(facts: FileFacts) -> str:
    """Return why these facts rule out that the log is the file's history; "" if they do not."""
    if facts.file_generation != facts.log_generation:
        return "the file belongs to another log, or its log was lost"
    if facts.file_nonce not in facts.log_nonces:
        return "the file is an older copy of itself: its last trim is not the one that the log knows"
    if facts.head < facts.latest:
        return f"the file ends at change {facts.head}, the log at {facts.latest}: commits were lost"
    return ""


def compare(mine: Iterable[Numbered], logged: Iterable[Transaction], upto: int) -> str:
    """Compare the changes that file and log both hold, byte for byte; return the first difference, "" if none.

    Two differences are valid. A logged update may be an insert in the file, because the replaced row is in another
    table and is trimmed sooner. Changes of one transaction may have been reordered on their way to the log; then
    each change is at another offset of that transaction, exactly once. `logged` may begin before `mine`.
    """
    here = iter(mine)
    offset, change = next(here, (upto + 1, None))
    odd = _OffsetMismatch()
    for part in logged:
        for place, theirs in enumerate(part.changes, part.first):
            while offset < place and change is not None:
                offset, change = next(here, (upto + 1, None))
            if change is None or place > upto:
                return odd.reason()
            odd.note(offset, change if offset == place else None, theirs)
        if part.last and (reason := odd.reason()):
            return reason
        if part.last:
            odd = _OffsetMismatch()
    return odd.reason()


class _OffsetMismatch:
    """The changes of one transaction that have different offsets in the file and in the log."""

    def __init__(self) -> None:
        self._file: list[tuple[int, tuple[object, ...]]] = []
        self._log: list[set[tuple[object, ...]]] = []

    def note(self, offset: int, mine: Change | None, theirs: Change) -> None:
        """Record the changes at `offset` if they differ; `mine` is None where the file holds no change any more."""
        if mine is not None and _bytes(mine) in _forms(theirs):
            return
        self._log.append(_forms(theirs))
        if mine is not None:
            self._file.append((offset, _bytes(mine)))

    def reason(self) -> str:
        """Return the first change of the file without a match of its own in the log; "" if each has a match."""
        left = list(self._log)
        for offset, found in self._file:
            match = next((forms for forms in left if found in forms), None)
            if match is None:
                return f"change {offset} in the file is not the one in the log"
            left.remove(match)
        return ""


def _forms(change: Change) -> set[tuple[object, ...]]:
    forms = {_bytes(change)}
    if change.op is Op.UPDATE:
        forms.add(_bytes(Change(Op.INSERT, change.table, None, change.after)))
    return forms


def _bytes(change: Change) -> tuple[object, ...]:
    images = tuple(None if row is None else encode_row(row) for row in (change.before, change.after))
    return (change.op, change.table.name, images, change.ddl)
