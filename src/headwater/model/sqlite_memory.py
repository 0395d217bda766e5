"""The accounting of SQLite's memory in this process, which its limits need."""

from __future__ import annotations

from functools import cache

import apsw


@cache
def count_memory() -> None:
    """Turn the accounting on, once. SQLite allows that before its first connection: modules that open one call this."""
    apsw.shutdown()
    apsw.config(apsw.SQLITE_CONFIG_MEMSTATUS, True)
    apsw.initialize()
