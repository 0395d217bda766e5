"""Which tables were emptied, as the stream told. PostgreSQL gives such a table a new file, as it does to one that was
unlogged for a while: by the transaction they are told apart. Pure."""

from __future__ import annotations

MOST = 1_000  # that are remembered: of one that is forgotten too soon a snapshot is asked for

Truncated = tuple[tuple[str, int], ...]  # the newest last: the table, and the transaction


def recalled(truncated: Truncated, name: str, xid: int) -> Truncated:
    """These, and one more."""
    return (*truncated[1 - MOST :], (name, xid))
