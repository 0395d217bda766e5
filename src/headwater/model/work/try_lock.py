"""A context manager that takes a lock without waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def try_lock(lock: threading.RLock) -> Iterator[bool]:
    """Take `lock` if it is free; yield whether it was."""
    is_held = lock.acquire(blocking=False)
    try:
        yield is_held
    finally:
        if is_held:
            lock.release()
