"""The journal of one reader: everything it received, in order, and its position each time.

A *session* is one connection, or one poll. It begins at a cursor; rows of a snapshot come before changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

BEGIN, ROWS, ROW, ROWS_END, RESTART = "begin", "rows", "row", "rows_end", "restart"
CHANGE, REACHED, CAUGHT_UP, CHECKPOINT, LOST, LOADED = "change", "reached", "caught_up", "checkpoint", "lost", "loaded"


class Entry(msgspec.Struct):
    """One step of a reader, or one event that it received.

    begin offset · rows · row body · rows_end offset · restart · change offset body · reached offset (a page ends)
    caught_up offset · checkpoint offset ts · lost reason · loaded offset body (whole tables, by URL)
    """

    kind: str
    offset: int = 0
    body: Any = None
    ts: int = 0
    time: float = 0.0


class Step(NamedTuple):
    """An entry, and the position of its reader before it."""

    entry: Entry
    at: int | None  # everything up to here was delivered in this session, or lay before it; None: not following
    high: int  # the same over all sessions
    exact: bool  # False from the first row of a snapshot until it has been caught up with
    is_first: bool  # the first news of the session


def walk(journal: list[Entry]) -> Iterator[Step]:
    """Yield the steps of a journal."""
    at: int | None = None
    high, exact, is_first = 0, True, True
    for entry in journal:
        kind = entry.kind
        if kind in (ROWS, RESTART):
            exact = False
        yield Step(entry, at, high, exact, is_first)
        exact = exact or kind == CAUGHT_UP
        is_first = kind in (BEGIN, ROWS, LOADED)
        if kind in (BEGIN, ROWS_END):
            at = entry.offset
        elif kind in (ROWS, LOST):
            at = None
        elif kind == LOADED:
            at = high = entry.offset
            exact = True
        elif kind in (CHANGE, REACHED, CAUGHT_UP, CHECKPOINT) and at is not None:
            at = max(at, entry.offset)
        if at is not None:
            high = max(high, at)
