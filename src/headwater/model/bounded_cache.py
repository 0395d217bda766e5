"""A cache of recently used values, bounded by their number and by their total weight."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Caches up to `most` values of up to `max_weight` together; evicts the least recently used. Thread-safe."""

    def __init__(self, most: int, max_weight: int) -> None:
        self._most, self._max_weight = most, max_weight
        self._lock = threading.Lock()  # guards all fields below
        self._known: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.weight = 0  # of all values

    def get(self, key: K) -> V | None:
        """Return the value of `key`; None if it is not cached."""
        with self._lock:
            found = self._known.get(key)
            if found is None:
                return None
            self._known.move_to_end(key)
            return found[0]

    def put(self, key: K, value: V, weight: int = 1) -> None:
        """Replace the value of `key`, and evict others if necessary; a value heavier than the limit is not cached."""
        with self._lock:
            self._pop(key)
            if weight > self._max_weight:
                return
            self._known[key] = value, weight
            self.weight += weight
            while len(self._known) > self._most or self.weight > self._max_weight:
                self._pop(next(iter(self._known)))

    def _pop(self, key: K) -> None:
        found = self._known.pop(key, None)
        if found is not None:
            self.weight -= found[1]

    def pop(self, key: K) -> None:
        """Remove the value of `key`, if it is cached."""
        with self._lock:
            self._pop(key)

    def clear(self) -> None:
        """Remove all values."""
        with self._lock:
            self._known.clear()
            self.weight = 0

    def __len__(self) -> int:
        return len(self._known)
