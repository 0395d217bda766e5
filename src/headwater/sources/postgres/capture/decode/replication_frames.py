"""The frames of a replication stream around pgoutput's messages: the server's frames, and our status updates.

Positions in PostgreSQL's WAL (LSN) are integers here and `16/B374D848` in text. Its times are microseconds since 2000.
"""

from __future__ import annotations

import re
import struct

from headwater.errors import SourceError

EPOCH_MS = 946_684_800_000  # 2000-01-01 in milliseconds since 1970-01-01
_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})\Z", re.ASCII)
_KEEPALIVE = struct.Struct(">cQqB")
_STATUS = struct.Struct(">cQQQqB")
DATA = ord("w")
DATA_HEAD = struct.calcsize(">cQQq")  # where the message begins in a frame that starts with DATA


class BadMessage(SourceError, ValueError):
    """A frame or message that violates the protocol: an unknown version, or a broken connection."""

    default_hint = "Connect again. If the error returns, Headwater does not know the server's version of pgoutput."


def decode_keepalive(data: bytes) -> tuple[int, bool]:
    """Return the end of the server's WAL in a keepalive, and whether the server requests a status update now."""
    if data[:1] != b"k" or len(data) != _KEEPALIVE.size:
        raise BadMessage(f"a frame of {len(data)} bytes that starts with {data[:1]!r}")
    _, end, _, reply = _KEEPALIVE.unpack(data)
    return end, bool(reply)


def status_update(lsn: int, *, now_ms: int, reply: bool = False) -> bytes:
    """Return a status update: everything up to `lsn` is written, flushed and applied, and the server may discard it."""
    return _STATUS.pack(b"r", lsn, lsn, lsn, (now_ms - EPOCH_MS) * 1000, reply)


def lsn_text(lsn: int) -> str:
    """Return an LSN as PostgreSQL writes it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def lsn_of(text: str) -> int:
    """Return the LSN that PostgreSQL wrote as `text`, or raise BadMessage."""
    found = _LSN.match(text)
    if found is None:
        raise BadMessage(f"{text[:40]!r} is not an LSN, a position in PostgreSQL's WAL")
    return int(found[1], 16) << 32 | int(found[2], 16)


def unix_us(us: int) -> int:
    """Return a PostgreSQL time as microseconds since 1970."""
    return 1000 * EPOCH_MS + us
