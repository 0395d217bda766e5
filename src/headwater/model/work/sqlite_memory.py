"""SQLite's memory in this process: the accounting that its limits need, and how freed memory is returned."""

from __future__ import annotations

import ctypes
import os
from functools import cache

import apsw

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
SETTINGS = {
    "MALLOC_ARENA_MAX": (M_ARENA_MAX, 2),  # otherwise each thread keeps an arena of its own
    "MALLOC_MMAP_THRESHOLD_": (M_MMAP_THRESHOLD, 256 << 10),  # larger blocks are unmapped as soon as they are freed
    "MALLOC_TRIM_THRESHOLD_": (M_TRIM_THRESHOLD, 16 << 20),  # a batch of rows is not returned and mapped again
}


@cache
def count_memory() -> None:
    """Turn SQLite's memory accounting on, once per process; call it before the first connection is opened."""
    apsw.shutdown()
    apsw.config(apsw.SQLITE_CONFIG_MEMSTATUS, True)
    apsw.initialize()


def return_freed_memory() -> None:
    """Limit what malloc keeps of freed memory, for this process. Call it before the process starts threads.

    Without it a few statements that SQLite ends at its memory limit leave gigabytes in the arenas of their threads.
    A setting in the environment wins. Other C libraries than glibc have no such call and need none.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for variable, (option, value) in SETTINGS.items():
            if variable not in os.environ:
                mallopt(option, value)
