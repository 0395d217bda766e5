"""What retention asks the log file: the sizes of its blocks, without reading them."""

from __future__ import annotations

import apsw

from headwater.log.log import Held

_BLOCKS = "SELECT first, count, bytes, raw, commit_ms_last FROM block WHERE first > ? ORDER BY first LIMIT ?"
_BLOCK_OF = "SELECT max(first) FROM block WHERE first <= ?"
# By the index alone: the blocks themselves may be gigabytes.
_BYTES_BEFORE = """
SELECT ifnull(sum(bytes), 0) FROM block INDEXED BY block_time
WHERE ts_first <= (SELECT ts_first FROM block WHERE first = ?1) AND first < ?1
"""


def blocks_after(connection: apsw.Connection, first: int, limit: int) -> list[Held]:
    """At most `limit` blocks that begin after `first`."""
    return [Held(*row) for row in connection.execute(_BLOCKS, (first, limit))]


def block_of(connection: apsw.Connection, offset: int) -> int:
    """Where the block begins that holds `offset`, or the last one before it; -1 without any."""
    found: int | None = connection.execute(_BLOCK_OF, (offset,)).get
    return -1 if found is None else found


def bytes_before(connection: apsw.Connection, first: int) -> int:
    """Bytes of all blocks before the one that begins at `first`; 0 if none does."""
    return int(connection.execute(_BYTES_BEFORE, (first,)).get)
