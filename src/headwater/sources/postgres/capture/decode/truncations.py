"""The truncated tables seen on the stream. PostgreSQL gives a new file to a truncated table, and also to a table that
was unlogged for a while: the transaction distinguishes the two. Pure."""

from __future__ import annotations

MOST = 1_000  # entries kept: a truncation forgotten too soon costs a snapshot

Truncated = tuple[tuple[str, int], ...]  # newest last: table and transaction


def recalled(truncated: Truncated, name: str, xid: int) -> Truncated:
    """Return `truncated` with table `name` and transaction `xid` appended, without the oldest beyond MOST."""
    return (*truncated[1 - MOST :], (name, xid))
