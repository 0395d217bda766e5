"""Hybrid timestamps: wall-clock milliseconds that never decrease, as one integer `ms << 16 | counter`."""

from __future__ import annotations

import re
import time

from headwater.errors import InvalidRequest

Timestamp = int  # 48 bits of milliseconds, 16 bits of counter

COUNTER_BITS = 16
MAX_COUNTER = (1 << COUNTER_BITS) - 1
MAX_MS = (1 << 48) - 1

_TEXT = re.compile(r"(\d{1,15})(?:\.(\d{1,5}))?", re.ASCII)


def wall_ms() -> int:
    """Return the current time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def ts_ms(ts: Timestamp) -> int:
    """Return the milliseconds of `ts`."""
    return ts >> COUNTER_BITS


def ts_of_ms(ms: int) -> Timestamp:
    """Return the first timestamp of millisecond `ms`; InvalidRequest if it does not fit into 48 bits."""
    if not 0 <= ms <= MAX_MS:
        raise InvalidRequest(f"{ms} is not a time in milliseconds", hint="Send milliseconds since 1970.")
    return ms << COUNTER_BITS


def ts_text(ts: Timestamp) -> str:
    """Return `<ms>.<counter>`, the wire format."""
    return f"{ts_ms(ts)}.{ts & MAX_COUNTER}"


def parse_ts(text: str) -> Timestamp:
    """Parse `<ms>.<counter>`, or `<ms>` for the first timestamp of that millisecond; else raise InvalidRequest."""
    found = _TEXT.fullmatch(text)
    if not found or int(found[2] or 0) > MAX_COUNTER or int(found[1]) > MAX_MS:
        raise InvalidRequest(
            f"{text[:40]!r} is not a timestamp",
            hint='Timestamps look like "1763172000000.0": milliseconds since 1970, a dot, a counter.',
        )
    return ts_of_ms(int(found[1])) | int(found[2] or 0)
