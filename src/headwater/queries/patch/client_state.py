"""Patches for a client that sends the keys of its rows, because the server no longer has its base answer."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.literal import from_lit
from headwater.queries.patch.patch import Answer, reset, written
from headwater.queries.patch.steps import NoSteps, steps

MOST_ROWS = 100_000
_FP = re.compile(r"[0-9a-f]{32}\Z")
_encode = msgspec.json.Encoder().encode


class HeldRow(msgspec.Struct, forbid_unknown_fields=True):
    """A row of the client: its key, and in strict mode its fingerprint."""

    pk: list[Any]
    fp: str | None = None


class ClientState(msgspec.Struct, forbid_unknown_fields=True):
    """`client_state` of query.patch: the rows of the client, in its order."""

    mode: str = "strict"
    rows: list[HeldRow] | None = None
    keys_bloom: Any = None


def fingerprint(text: bytes) -> str:
    """Return `fp` of a row: the first 32 hex digits of SHA-256 over its JSON text as sent."""
    return hashlib.sha256(text).hexdigest()[:32]


def diff_state(
    state: ClientState, fresh: Answer, base_tag: str | None = None, *, include_full: bool = True
) -> dict[str, Any]:
    """Return the patch from the rows in `state` to `fresh`.

    In mode strict it is exact. In mode membership_only it adds, removes and moves rows; whether a remaining row has
    changed is not known here: the client finds out by `result_hash`.
    """
    held = _checked(state)
    if fresh.key is None:
        raise NotSupported(
            "a patch for `client_state` needs rows with a key",
            hint="Select the primary key, or request the whole answer.",
        )
    keys = [_key(row, fresh) for row in held]
    if len(set(keys)) != len(keys):
        raise InvalidRequest("`client_state.rows` contains a key twice", hint="Send each row once.")
    strict = state.mode == "strict"
    fresh_keys = [fresh.key_of(place) for place in range(len(fresh.texts))]
    new, old = fresh_keys, keys
    if strict:
        new = [key + fingerprint(text).encode() for key, text in zip(fresh_keys, fresh.texts, strict=True)]
        old = [key + (row.fp or "").encode() for key, row in zip(keys, held, strict=True)]
    try:
        found = steps(old, new, keys.__getitem__, fresh_keys.__getitem__, ordered=fresh.ordered)
    except NoSteps as why:
        return reset(fresh, base_tag, str(why), include_full=include_full)
    patch = written(found, fresh, base_tag, "client_state", keys.__getitem__)
    return patch if strict else patch | {"partial": True, "updated_unknown": True}


def _checked(state: ClientState) -> list[HeldRow]:
    if state.mode == "add_only" or state.keys_bloom is not None:
        raise NotSupported(
            "`client_state` with a Bloom filter (add_only, keys_bloom) is not supported: it identifies rows inexactly",
            hint='Send mode "strict" or "membership_only" with `rows`.',
        )
    if state.mode not in ("strict", "membership_only"):
        raise InvalidRequest(f"unknown mode {state.mode[:40]!r}", hint='Use "strict" or "membership_only".')
    if state.rows is None:
        raise InvalidRequest("`client_state.rows` is missing", hint="Send the client's rows; [] for none.")
    if len(state.rows) > MOST_ROWS:
        raise InvalidRequest(
            f"`client_state.rows` has {len(state.rows)} rows, more than {MOST_ROWS}", hint="Request the whole answer."
        )
    if state.mode == "strict" and not all(row.fp and _FP.match(row.fp) for row in state.rows):
        raise InvalidRequest(
            "in mode strict every row of `client_state` needs an `fp`",
            hint="Send the first 32 hex digits of SHA-256 over the row's JSON text as it was received.",
        )
    return state.rows


def _key(row: HeldRow, fresh: Answer) -> bytes:
    assert fresh.key is not None
    if len(row.pk) != len(fresh.key):
        raise InvalidRequest(f"`pk` has {len(row.pk)} values, but the key has {len(fresh.key)}")
    return _encode([fresh.form.write(from_lit(value)) for value in row.pk])
