"""The security methods: tickets for streams, and API keys."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from headwater.errors import Forbidden, HeadwaterError, InvalidRequest, NotSupported, StorageFull
from headwater.model.principal import OWNER, RANK, VIEWER, Principal, Scope, is_label
from headwater.serve.api import Api
from headwater.serve.auth.api_keys import Key, Keys
from headwater.serve.auth.gate import Gate
from headwater.serve.auth.json_web_tokens import scopes_of
from headwater.serve.rpc import params

ADMIN_ROLE = "admin"  # SkeinDB's word for owner


def ticket(api: Api, who: Principal, p: params.Nothing) -> Any:
    """Return a ticket of the caller (security.ticket.create)."""
    return _gate(api).tickets.create(who)


def create(api: Api, who: Principal, p: params.TokenCreate) -> Any:
    """Create an API key with at most the caller's scopes and lifetime; return it (security.token.create)."""
    name, role = _label(p), _role(p)
    scopes = who.scopes if p.scopes is None else _scopes(p.scopes)
    _check_within(who, scopes)
    now = time.time_ns() // 1_000_000
    lifetime_ms = p.ttl_ms or 1000 * (p.expires_in_seconds or 0)
    until = now + lifetime_ms if lifetime_ms else None
    if who.until is not None:
        until = min(until or who.until, who.until)
    text, made = _keys(api).create(name, role, scopes, until, now_ms=now)
    unknown = _unknown(api, scopes or ()) if p.scopes is not None else []
    shown = {**_shown(made), "token": text, "secret": text, "expires_at_ms": made.until_ms}
    if p.name is None and p.role in (None, ADMIN_ROLE):
        shown["role"] = ADMIN_ROLE
    return shown | ({"unknown_scopes": unknown} if unknown else {})


def _label(p: params.TokenCreate) -> str:
    if p.name is not None and p.label is not None and p.name != p.label:
        raise InvalidRequest("`name` and `label` differ, and both set the label of the key", hint="Send one of them.")
    name = p.name or p.label or "token"
    if not is_label(name):
        field = "name" if p.name else "label"
        raise InvalidRequest(f"`{field}` is blank or has unprintable characters", hint='Send one such as "reports".')
    return name


def _role(p: params.TokenCreate) -> str:
    """Return the role; without `name` the request has SkeinDB's shape, whose default is its role `admin`."""
    role = p.role if p.role is not None else VIEWER if p.name is not None else ADMIN_ROLE
    if role == ADMIN_ROLE:
        return OWNER
    if role not in RANK:
        raise InvalidRequest(f"there is no role {role[:40]!r}", hint=f"There are: {', '.join(RANK)}.")
    return role


def listed(api: Api, who: Principal, p: params.Nothing) -> Any:
    """Return the API keys whose scopes are within the caller's (security.token.list)."""
    return {"tokens": [_shown(key) for key in _keys(api).all() if _is_below(who, key)]}


async def revoke(api: Api, who: Principal, p: params.TokenRevoke) -> Any:
    """Revoke an API key and end its open streams (security.token.revoke)."""
    id = p.id if p.token_id is None else p.token_id
    if id is None or (p.id is not None and p.id != id):
        raise InvalidRequest(
            "`id` is missing, or differs from `token_id`", hint="Send the `id` of a key from security.token.list."
        )
    try:
        await asyncio.to_thread(_keys(api).revoke, id, lambda key: _is_below(who, key))
    except StorageFull:
        _gate(api).sessions.revoke(id)
        raise
    return {"id": id, "token_id": id, "revoked": True, "streams_ended": _gate(api).sessions.revoke(id)}


def _gate(api: Api) -> Gate:
    if api.gate is None:
        raise NotSupported("this server issues no tickets and API keys")
    return api.gate


def _keys(api: Api) -> Keys:
    found = _gate(api).keys
    if found is None:
        raise NotSupported("this server stores no API keys", hint="Start it with a data directory.")
    return found


def _scopes(given: list[str]) -> tuple[Scope, ...]:
    try:
        return scopes_of(given)
    except ValueError:
        raise InvalidRequest(
            "`scopes` has an empty name", hint='Send ["shop", "main.orders"], or omit the field.'
        ) from None


def _check_within(who: Principal, scopes: tuple[Scope, ...] | None) -> None:
    if scopes is None and who.scopes is not None:
        raise Forbidden("a key without scopes has more rights than the caller", hint="Send `scopes` within your own.")
    for scope in scopes or ():
        who.check(scope.db, scope.tables or None)


def _unknown(api: Api, scopes: tuple[Scope, ...]) -> list[str]:
    """Return the scopes that name no existing database or table; the caller may see all of `scopes`."""
    found, there = [], api.databases.names()
    for scope in scopes:
        if scope.db not in there:
            found += _texts(scope)
        elif scope.tables:
            with suppress(HeadwaterError):  # a database that is not available reports no tables
                tables = api.databases.get(scope.db).describe()
                found += [f"{scope.db}.{table}" for table in scope.tables if table not in tables]
    return found


def _texts(scope: Scope) -> list[str]:
    return [f"{scope.db}.{table}" for table in scope.tables] or [scope.db]


def _is_below(who: Principal, key: Key) -> bool:
    try:
        _check_within(who, key.scopes)
    except Forbidden:
        return False
    return True


def _shown(key: Key) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": key.id,
        "token_id": key.id,
        "name": key.name,
        "label": key.name,
        "role": key.role,
        "created_ms": key.created_ms,
        "created_at_ms": key.created_ms,
    }
    if key.scopes is not None:
        found["scopes"] = [text for scope in key.scopes for text in _texts(scope)]
    if key.until_ms is not None:
        found["expires_at_ms"] = key.until_ms
    return found
