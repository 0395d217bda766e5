"""Opening: how a transport wants a stream, and where its reader says it was."""

from __future__ import annotations

import msgspec

from headwater.feeds.formats.frame import Frame
from headwater.feeds.options import Options


class Opening(msgspec.Struct, frozen=True):
    """How a transport wants its stream: its name, the frame, a sign of life, and the last words."""

    transport: str
    frame: Frame
    ping: bytes = b""
    farewell: bytes = b""
    format: str = ""  # of its own, for changes with both images; "": the one that was asked for
    key: bytes | None = None  # only changes of this key

    def shaped(self, options: Options) -> Options:
        """`options` as the transport has them."""
        if not self.format:
            return options
        return msgspec.structs.replace(options, format=self.format, before=True, after=True, key=self.key)


class From(msgspec.Struct, frozen=True):
    """Where a reader says it was: an offset by parameter, else the id of the last frame it saw."""

    offset: int | None = None
    last_id: str = ""

    @property
    def cursor(self) -> int | None:
        """The offset asked for."""
        if self.offset is not None or not self.last_id or self.place:
            return self.offset
        return int(self.last_id)

    @property
    def place(self) -> str:
        """The place in a snapshot asked for."""
        return self.last_id[2:] if self.offset is None and self.last_id.startswith("s:") else ""
