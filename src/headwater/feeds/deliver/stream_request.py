"""The parameters of a new stream: those of its transport, and the position that its reader sent."""

from __future__ import annotations

import msgspec

from headwater.feeds.formats.frame import Frame
from headwater.feeds.options import Options


class Transport(msgspec.Struct, frozen=True):
    """The parameters of a transport: its name, its frame function, and the bytes of a ping and of the end."""

    transport: str
    frame: Frame
    ping: bytes = b""
    farewell: bytes = b""
    format: str = ""  # the transport's own format, with both images; "": the format that the reader requested
    key: bytes | None = None  # deliver only changes of this key

    def shaped(self, options: Options) -> Options:
        """Return `options` with the format and key of the transport."""
        if not self.format:
            return options
        return msgspec.structs.replace(options, format=self.format, before=True, after=True, key=self.key)


class ReaderPosition(msgspec.Struct, frozen=True):
    """The position that a reader sent: the offset of a parameter, else the id of the last frame it received."""

    offset: int | None = None
    last_id: str = ""

    @property
    def cursor(self) -> int | None:
        """Return the requested offset; None if the reader sent none, or a snapshot cursor instead."""
        if self.offset is not None or not self.last_id or self.snapshot_cursor:
            return self.offset
        return int(self.last_id)

    @property
    def snapshot_cursor(self) -> str:
        """Return the requested snapshot cursor; "" if the reader sent none, or an offset too."""
        return self.last_id[2:] if self.offset is None and self.last_id.startswith("s:") else ""
