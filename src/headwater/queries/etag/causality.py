"""Causality tokens (`vector_clock_v2`): the offset up to which a reader has seen each table.

Sent back as `min_causality`, a token is a floor: the answer must include every change up to its offsets. Tables that
the query does not read are not compared. `main.*` stands for all tables of a database: a header that would be too
long contains only that, which demands slightly more.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from headwater.errors import InvalidRequest, PreconditionFailed
from headwater.model import json_decoder
from headwater.model.database_name import real_name

FORMAT = "vector_clock_v2"
FORMATS = (FORMAT, "etag_chain_v1")  # both are read in the same way; the first is written
MAX_DEPS = 1_000
MAX_HEADER = 2_048  # characters: proxies limit all headers of an answer to 4 or 8 KiB
WHOLE = "*"  # in place of a table name: all tables of the database
HINT = 'A token looks like {"format": "vector_clock_v2", "deps": [{"table": "main.users", "v": 3}]}.'
_MALFORMED = "malformed min_causality"


class Dep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The offset of the last change of one table, or the offset up to which a materialized view was seen.

    Headwater writes tables only: a view of the database is resolved to its tables.
    """

    table: str
    v: int | None = None
    view: bool | None = None
    change_seq: int | None = None
    stale: bool | None = None

    @property
    def key(self) -> tuple[str, bool]:
        """Return the table or view without aliases, and whether it is a view."""
        db, _, name = self.table.partition(".")
        return f"{real_name(db)}.{name}", bool(self.view)

    @property
    def seen(self) -> int:
        """Return the offset up to which it was seen."""
        return (self.change_seq if self.view else self.v) or 0


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The offsets that a reader of the answer has seen."""

    format: str
    deps: tuple[Dep, ...] = ()


_decoder = json_decoder.decoder(Token)

# --- making, reading, writing ----------------------------------------------------------------------------


def token(db: str, tables: Mapping[str, int]) -> Token:
    """Return the token of a read or write that saw `tables`, each up to the given offset of its last change."""
    return Token(FORMAT, tuple(Dep(f"{db}.{name}", offset) for name, offset in sorted(tables.items())))


def check(found: Token) -> Token:
    """Return `found` if its format is supported and it is well-formed; else raise InvalidRequest."""
    if found.format not in FORMATS:
        raise InvalidRequest(f"unsupported causality format {found.format[:40]!r}", hint=HINT)
    if len(found.deps) > MAX_DEPS or not all(map(_is_whole, found.deps)):
        raise InvalidRequest(_MALFORMED, hint=HINT)
    return found


def _is_whole(dep: Dep) -> bool:
    """Return whether the entry has the fields of its kind, a table or a view, and no others."""
    _, dot, name = dep.table.partition(".")
    if dep.view:
        fits = dep.v is None and dep.change_seq is not None and dep.change_seq >= 0
    else:
        fits = dep.v is not None and dep.v >= 0 and dep.change_seq is None and dep.stale is None
    return fits and bool(dot and name)


def from_json(body: Any) -> Token:
    """Return the token in the decoded JSON of a request."""
    try:
        return check(msgspec.convert(body, Token))
    except (msgspec.ValidationError, RecursionError):
        raise InvalidRequest(_MALFORMED, hint=HINT) from None


def parse(text: bytes | str) -> Token:
    """Return the token in JSON text."""
    try:
        return check(_decoder.decode(text))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise InvalidRequest(_MALFORMED, hint=HINT) from None


def to_header(found: Token) -> str:
    """Return the token as base64url without padding; if that is too long, with one entry per database."""
    text = _base64(found)
    return text if len(text) <= MAX_HEADER else _base64(whole(found))


def _base64(found: Token) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(found)).rstrip(b"=").decode()


def whole(found: Token) -> Token:
    """Return the token with one entry per database, at the highest offset: it is at least as strict."""
    most: dict[str, int] = {}
    for dep in found.deps:
        if not dep.view:
            db = real_name(dep.table.partition(".")[0])
            most[db] = max(dep.seen, most.get(db, 0))
    views = (dep for dep in found.deps if dep.view)
    return Token(found.format, (*(Dep(f"{db}.{WHOLE}", seen) for db, seen in sorted(most.items())), *views))


def from_header(text: str) -> Token:
    """Return the token of a header, padded or not."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("the causality header is not base64url", hint=HINT) from None
    return parse(data)


# --- comparing -------------------------------------------------------------------------------------------


def floor_of(found: Token, db: str, tables: Collection[str]) -> dict[str, int]:
    """Return the offsets that an answer over `tables` of `db` must have reached, for the tables that the token names.

    The key `WHOLE` is included if the token names the whole database.
    """
    names = {(f"{real_name(db)}.{name}", False): name for name in (*tables, WHOLE)}
    floor: dict[str, int] = {}
    for dep in found.deps:
        name = names.get(dep.key)
        if name is not None:
            floor[name] = max(dep.seen, floor.get(name, 0))
    return floor


def lacking(floor: Mapping[str, int], reached: Mapping[str, int]) -> dict[str, int]:
    """Return the part of `floor` that is above `reached`; empty if the floor is met."""
    return {name: offset for name, offset in floor.items() if offset > reached.get(name, 0)}


def demand(floor: Mapping[str, int], reached: Mapping[str, int], *, began: int = 1) -> None:
    """Raise PreconditionFailed unless `floor` is met. `began` is the first offset of the log's generation.

    A floor of an earlier generation is never met: the changes that its holder saw may not exist in this one. A floor
    of 0 demands nothing.
    """
    old = sorted(name for name, offset in floor.items() if 0 < offset < began - 1)
    if old:
        raise PreconditionFailed(
            f"the causality token names offset {floor[old[0]]} of {old[0]!r}, from an earlier generation of the log",
            hint="Drop the token and read again without min_causality.",
        )
    ahead = lacking(floor, reached)
    if ahead:
        name, offset = min(ahead.items())
        raise PreconditionFailed(
            f"{name!r} is at {reached.get(name, 0)} here, below the floor {offset}",
            hint="Retry in a moment: the change has not arrived yet, or the token is from another database.",
        )
