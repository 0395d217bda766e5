"""Reference implementation of applying a patch to rows; the JavaScript client implements the same rule."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from headwater.errors import Conflict
from headwater.queries.patch.patch import Form

Raw = msgspec.Raw


class _Row(msgspec.Struct):
    pk: Raw
    at: int = 0
    row: Raw = Raw()
    obj: Raw = Raw()

    @property
    def text(self) -> bytes:
        return bytes(self.row) or bytes(self.obj)


class _Move(msgspec.Struct):
    pk: Raw
    from_: int = msgspec.field(name="from")
    to: int = 0


class _Full(msgspec.Struct):
    rows: list[Raw]


class _Patch(msgspec.Struct):
    reset: bool
    columns: list[dict[str, Any]]
    result_hash: str
    ordered: bool = True
    key: tuple[int, ...] | None = None
    full: _Full | None = None
    added: list[_Row] = []
    updated: list[_Row] = []
    removed: list[_Row] = []
    moved: list[_Move] = []


_patches = msgspec.json.Decoder(_Patch)


def apply(patch: bytes, rows: Sequence[bytes], form: Form | None = None) -> list[bytes]:
    """Return the rows after `patch`, each as its JSON text; Conflict if their hash is not that of the server."""
    read = _patches.decode(patch)
    if read.reset:
        if read.full is None:
            raise Conflict("the patch is a reset without rows", hint="Request the whole answer.")
        result = list(map(bytes, read.full.rows))
    else:
        result = _stepped(read, rows, form or Form())
    if rows_hash(result, ordered=read.ordered) != read.result_hash:
        raise Conflict("the patch does not fit these rows", hint="Request the whole answer.")
    return result


def rows_hash(rows: Sequence[bytes], *, ordered: bool = True) -> str:
    """Return `result_hash`: SHA-256 over the array of row texts as sent, sorted by bytes if they are unordered."""
    text = b"[%s]" % b",".join(rows if ordered else sorted(rows))
    return "sha256:" + hashlib.sha256(text).hexdigest()


def _stepped(patch: _Patch, rows: Sequence[bytes], form: Form) -> list[bytes]:
    names, places = [column["name"] for column in patch.columns], patch.key or ()
    held = {form.key(names, places, row): row for row in rows}
    result = [*held] if len(held) == len(rows) else _refused()
    for one in patch.removed:
        result.remove(_known(held, one.pk))
    for one in patch.updated:
        held[_known(held, one.pk)] = one.text
    for one in patch.added:
        held[bytes(one.pk)] = one.text
        result.insert(one.at, bytes(one.pk))
    for move in patch.moved:
        if not 0 <= move.from_ < len(result) or result[move.from_] != bytes(move.pk):
            _refused()
        result.insert(move.to, result.pop(move.from_))
    return [held[key] for key in result]


def _known(held: dict[bytes, bytes], key: Raw) -> bytes:
    return bytes(key) if bytes(key) in held else _refused()


def _refused() -> Any:
    raise Conflict("the patch does not fit these rows", hint="Request the whole answer.")
