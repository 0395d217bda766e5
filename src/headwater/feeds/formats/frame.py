"""Frames of transports: a function, or, where all frames look alike, the bytes around id, word and data."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

Frame = Callable[[int | str, str, bytes], bytes]  # from id, event word and JSON to one frame of a transport


class FrameTemplate(NamedTuple):
    """The constant bytes of a change's frame: before its id and its word (None if not sent), before and after its
    JSON."""

    id: bytes | None
    word: bytes | None
    data: bytes
    end: bytes


@runtime_checkable
class TemplateFrame(Protocol):
    """A frame function whose frames are the constant bytes of `enclosing` around id, word and data."""

    enclosing: FrameTemplate

    def __call__(self, id: int | str, word: str, data: bytes) -> bytes:
        """Return one frame of the transport around `data`, which is JSON already."""
