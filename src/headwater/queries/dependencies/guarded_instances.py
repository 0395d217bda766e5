"""The guards of watched instances, within limits of memory and time; the oldest recorded are dropped first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from headwater.model.change import Change
from headwater.queries.dependencies.guards import GuardState

MAX_GUARDED = 1_000  # instances
MAX_HELD_KEYS = 1_000_000  # of all instances together: about 100 MB
MAX_ASKED = 10_000  # guard checks in one pass over the log: about 100 ms


class GuardedInstances:
    """Guards by instance, each with the offset of its answer. Not thread-safe."""

    def __init__(self) -> None:
        self.suppressed = 0  # relevant changes that guards proved to leave the answer unchanged
        # By instance: its guards, the offset of their answer, and the number of their keys.
        self._held: OrderedDict[Hashable, tuple[GuardState, int, int]] = OrderedDict()
        self._keys = self._asked = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def is_whole(self, key: Hashable) -> bool:
        """Return whether an instance still has all guards of its answer."""
        found = self._held.get(key)
        return found is not None and found[0].is_whole

    def put(self, key: Hashable, state: GuardState, offset: int) -> None:
        """Store the guards of the answer at `offset`, and drop older ones of the instance."""
        self.drop(key)
        self._held[key] = state, offset, state.size
        self._keys += state.size
        while len(self._held) > MAX_GUARDED or self._keys > MAX_HELD_KEYS:
            self.drop(next(iter(self._held)))

    def drop(self, key: Hashable) -> None:
        """Drop the guards of an instance, if it has any."""
        found = self._held.pop(key, None)
        if found is not None:
            self._keys -= found[2]

    def clear(self) -> None:
        """Drop all guards."""
        self._held.clear()
        self._keys = 0

    def begin(self) -> None:
        """Start a new pass over the log, with a new budget of checks."""
        self._asked = 0

    def suppresses(self, key: Hashable, offset: int, change: Change, place: int) -> bool:
        """Return whether a change, first relevant to table reference `place`, leaves an instance's answer unchanged.

        Call it for every change that is relevant to the instance, in order.
        """
        found = self._held.get(key)
        if found is None or offset <= found[1]:  # guards know nothing about changes before their answer
            return False
        self._asked += 1
        if self._asked > MAX_ASKED:
            self.clear()
            return False
        is_suppressed = found[0].suppresses(change, place)
        if not found[0]:
            self.drop(key)
        self.suppressed += is_suppressed
        return is_suppressed
