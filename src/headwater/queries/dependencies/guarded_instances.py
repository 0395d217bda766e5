"""Which watched instances hold guards: within bounds of memory and of time, those that were recorded last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from headwater.model.change import Change
from headwater.queries.dependencies.guards import GuardState

MAX_GUARDED = 1_000  # instances
MAX_HELD_KEYS = 1_000_000  # of all of them together: about 100 MB
MAX_ASKED = 10_000  # questions in one look at the log: about 100 ms


class Guarded:
    """Guards by instance, each with the offset of the answer it was recorded with. For one thread."""

    def __init__(self) -> None:
        self.suppressed = 0  # changes that matter to an instance, and were found to leave its answer as it is
        self._held: OrderedDict[Hashable, tuple[GuardState, int, int]] = OrderedDict()  # and how many keys it had
        self._keys = self._asked = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def is_whole(self, key: Hashable) -> bool:
        """Whether an instance has all the guards that its answer gave."""
        found = self._held.get(key)
        return found is not None and found[0].is_whole

    def put(self, key: Hashable, state: GuardState, offset: int) -> None:
        """Keep the guards of the answer at `offset` in place of older ones."""
        self.drop(key)
        self._held[key] = state, offset, state.size
        self._keys += state.size
        while len(self._held) > MAX_GUARDED or self._keys > MAX_HELD_KEYS:
            self.drop(next(iter(self._held)))

    def drop(self, key: Hashable) -> None:
        """Forget the guards of an instance, if it has any."""
        found = self._held.pop(key, None)
        if found is not None:
            self._keys -= found[2]

    def clear(self) -> None:
        """Forget all guards."""
        self._held.clear()
        self._keys = 0

    def begin(self) -> None:
        """A new look at the log begins."""
        self._asked = 0

    def suppresses(self, key: Hashable, offset: int, change: Change, place: int) -> bool:
        """Whether the change at `offset`, which matters to `place` first, leaves the answer of an instance as it is.

        To be asked of every change that matters to it, in order.
        """
        found = self._held.get(key)
        if found is None or offset <= found[1]:  # the guards were made behind it: they cannot tell
            return False
        self._asked += 1
        if self._asked > MAX_ASKED:
            self.clear()
            return False
        is_held_back = found[0].suppresses(change, place)
        if not found[0]:
            self.drop(key)
        self.suppressed += is_held_back
        return is_held_back
