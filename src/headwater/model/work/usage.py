"""A counter of what each caller holds: slots, connections or bytes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Usage(Generic[K]):
    """How much each key holds. A key that holds nothing has no entry. Not thread-safe."""

    def __init__(self) -> None:
        self._held: dict[K, int] = {}
        self.total = 0  # of all keys

    def __getitem__(self, key: K) -> int:
        return self._held.get(key, 0)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, key: K, count: int = 1) -> int:
        """Count `count` more for `key`; return how much `key` holds now."""
        held = self._held[key] = self._held.get(key, 0) + count
        self.total += count
        return held

    def remove(self, key: K, count: int = 1) -> None:
        """Count `count` less for `key`, at least down to nothing."""
        self.total -= count
        left = self._held.pop(key, 0) - count
        if left > 0:
            self._held[key] = left

    @contextmanager
    def held(self, key: K, count: int = 1) -> Iterator[None]:
        """Count `count` more for `key` until the block ends."""
        self.add(key, count)
        try:
            yield
        finally:
            self.remove(key, count)
