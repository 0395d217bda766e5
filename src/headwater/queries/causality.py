"""Causality tokens: which change of each table a writer has seen, in JSON and as a header."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

import msgspec

from headwater.errors import InvalidRequest

FORMAT = "vector_clock_v2"
FORMATS = (FORMAT, "etag_chain_v1")  # read alike; the first is written
HINT = 'A token looks like {"format": "vector_clock_v2", "deps": [{"table": "main.users", "v": 3}]}.'


class Dep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The offset of the last change of one table."""

    table: str
    v: int


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a reader of the answer has seen."""

    format: str
    deps: tuple[Dep, ...] = ()


_decoder = msgspec.json.Decoder(Token)


def token(db: str, tables: Mapping[str, int]) -> Token:
    """The token of a write that changed `tables`, each to the offset of its last change."""
    return Token(FORMAT, tuple(Dep(f"{db}.{name}", offset) for name, offset in sorted(tables.items())))


def check(found: Token) -> Token:
    """`found` if we can read it."""
    if found.format not in FORMATS:
        raise InvalidRequest(f"unsupported causality format {found.format!r}", hint=HINT)
    if any("." not in dep.table or dep.v < 0 for dep in found.deps):
        raise InvalidRequest("malformed causality token", hint=HINT)
    return found


def parse(text: bytes | str) -> Token:
    """The token written as JSON in `text`."""
    try:
        return check(_decoder.decode(text))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise InvalidRequest("malformed causality token", hint=HINT) from None


def to_header(found: Token) -> str:
    """The base64url form, without padding."""
    return base64.urlsafe_b64encode(msgspec.json.encode(found)).rstrip(b"=").decode()


def from_header(text: str) -> Token:
    """The token of a header, padded or not."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("the causality header is not base64url", hint=HINT) from None
    return parse(data)
