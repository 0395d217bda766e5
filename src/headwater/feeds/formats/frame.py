"""How a transport frames what it sends: by a function, or, where its frames are always alike, by what stands around."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

Frame = Callable[[int | str, str, bytes], bytes]  # id, what it is, JSON: one frame of a transport


class Enclosing(NamedTuple):
    """The same bytes in every frame of a change: before its id and before its word, where those are sent, before its
    JSON, and after it."""

    id: bytes | None
    word: bytes | None
    data: bytes
    end: bytes


@runtime_checkable
class Enclosed(Protocol):
    """A frame that is its parts one after another, whatever they are."""

    enclosing: Enclosing

    def __call__(self, id: int | str, word: str, data: bytes) -> bytes:
        """See Frame."""
        ...
