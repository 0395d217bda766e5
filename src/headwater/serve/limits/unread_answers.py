"""Limit on the memory of answers and stream pieces that were made and that their clients have not taken yet."""

from __future__ import annotations

from headwater.errors import Busy
from headwater.model.principal import OWNER, Principal
from headwater.model.work.answer_limits import AnswerMemory
from headwater.serve.limits.limits import identity

# Half of it for one caller. It is separate from the memory of answers being made, because only its caller can end a
# call whose single answer is not taken yet.
UNREAD = AnswerMemory()
UNREAD.configure(max_memory=256 << 20)


class Unread:
    """The bytes of one call's answer that its caller has not read yet, counted in `UNREAD`."""

    def __init__(self, who: Principal, address: str) -> None:
        self._key = None if who.role == OWNER else identity(who, address)
        self._size = 0

    def hold(self, size: int) -> None:
        """Count `size` bytes until `release`. Raises Busy if too many are unread."""
        size = min(size, UNREAD.max_bytes)
        UNREAD.reserve(size)
        if self._key is not None:
            try:
                UNREAD.charge(self._key, size)
            except Busy:
                UNREAD.release(size)
                raise
        self._size = size

    def release(self) -> None:
        """Stop counting."""
        size, self._size = self._size, 0
        if size:
            UNREAD.release(size, self._key)
