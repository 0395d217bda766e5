"""Query strings of bulk pulls: versions, spans, columns and conditions. No I/O."""

from __future__ import annotations

import msgspec

from headwater.errors import InvalidRequest
from headwater.model.keys.key import Span, prefix_end
from headwater.ranges.pull.jobs import LZ4, Selection
from headwater.serve.http.query_string import digits, list_in, number

MAX_KEY = 16 << 10  # bytes


def version_in(text: str) -> tuple[str, int]:
    """Return the generation and the offset of a version."""
    generation, _, offset = text.rpartition(".")
    if not generation or not digits(offset, 18):
        raise InvalidRequest(
            f"version {text[:60]!r} cannot be read", hint="Omit it to be redirected to the current version."
        )
    return generation, int(offset)


def offset_in(query: dict[str, str], name: str) -> int:
    """Return the offset in the parameter `name`; InvalidRequest without one."""
    found = number(query, name)
    if found is None:
        raise InvalidRequest(f"`{name}` is missing", hint="Send after=N&upto=M: changes after N up to and with M.")
    return found


def range_in(query: dict[str, str]) -> tuple[int, int] | None:
    """Return the id and the epoch of a range; None without a range."""
    if ("range" in query) != ("epoch" in query):
        raise InvalidRequest("`range` and `epoch` belong together", hint="Send both as pull.ranges returned them.")
    found, epoch = number(query, "range"), number(query, "epoch")
    return None if found is None or epoch is None else (found, epoch)


def span_in(query: dict[str, str]) -> Span:
    """Return the span of keys from `start` to before `end`; every key without both."""
    start, end = _key(query, "start") or b"", _key(query, "end")
    if end is not None and start >= end:
        raise InvalidRequest("`start` is not below `end`", hint="Send bounds in byte order.")
    return Span(start, end)


def rest_of(span: Span, query: dict[str, str]) -> Span:
    """Return the part of `span` after the key `after`, which may be empty; `span` without `after`."""
    after = _key(query, "after")
    if after is None:
        return span
    start = max(span.start, prefix_end(after) or after + b"\0")
    return Span(start, span.end) if span.end is None or start < span.end else Span(span.end, span.end)


def pick_in(query: dict[str, str], span: Span, *, is_restricted: bool) -> Selection:
    """Return the requested rows and columns; `is_restricted`: the caller's credential names tables."""
    return Selection(span, names_in(query, "columns"), query.get("where"), is_restricted)


def names_in(query: dict[str, str], name: str) -> tuple[str, ...] | None:
    """Return a list of names: comma-separated, or JSON for names with commas."""
    text = list_in(query, name)
    if text is None:
        return None
    if not text.startswith("["):
        return tuple(word.strip() for word in text.split(","))
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise InvalidRequest(f"{name} cannot be read", hint='Send a,b or, percent-encoded, ["a","b"].') from None


def compression_in(query: dict[str, str]) -> str | None:
    """Return the requested compression of Arrow buffers: LZ4 or None."""
    found = query.get("compression")
    if found not in (None, LZ4):
        raise InvalidRequest(f"compression {found[:60]!r} is not known", hint="Send compression=lz4, or omit it.")
    return found


def _key(query: dict[str, str], name: str) -> bytes | None:
    text = query.get(name)
    if text is None:
        return None
    try:
        if len(text) > 2 * MAX_KEY or not text.isalnum():
            raise ValueError
        return bytes.fromhex(text)
    except ValueError:
        if not text:
            return b"" if name != "end" else None
        raise InvalidRequest(
            f"`{name}` is not a key in hex", hint="Send back key bytes as they were received."
        ) from None
