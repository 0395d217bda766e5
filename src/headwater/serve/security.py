"""The security methods: tickets for streams, and API keys."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from headwater.errors import Forbidden, HeadwaterError, InvalidRequest, NotSupported
from headwater.model.principal import RANK, Principal, Scope
from headwater.serve import params
from headwater.serve.api import Api
from headwater.serve.auth import Gate
from headwater.serve.jwts import scopes_of
from headwater.serve.keys import Key, Keys


def ticket(api: Api, who: Principal, p: params.Nothing) -> Any:
    """security.ticket.create"""
    return _gate(api).tickets.create(who)


def create(api: Api, who: Principal, p: params.TokenCreate) -> Any:
    """security.token.create. Nobody hands on more than they have."""
    if p.role not in RANK:
        raise InvalidRequest(f"there is no role {p.role[:40]!r}", hint=f"There are: {', '.join(RANK)}.")
    scopes = who.scopes if p.scopes is None else _scopes(p.scopes)
    _check_within(who, scopes)
    now = time.time_ns() // 1_000_000
    until = None if p.expires_in_seconds is None else now + p.expires_in_seconds * 1000
    if who.until is not None:
        until = min(until or who.until, who.until)
    text, made = _keys(api).create(p.name, p.role, scopes, until)
    unknown = _unknown(api, scopes or ()) if p.scopes is not None else []
    return {**_shown(made), "token": text} | ({"unknown_scopes": unknown} if unknown else {})


def listed(api: Api, who: Principal, p: params.Nothing) -> Any:
    """security.token.list"""
    return {"tokens": [_shown(key) for key in _keys(api).all() if _is_below(who, key)]}


async def revoke(api: Api, who: Principal, p: params.TokenRevoke) -> Any:
    """security.token.revoke. What is open in its name ends."""
    await asyncio.to_thread(_keys(api).revoke, p.id, lambda key: _is_below(who, key))
    return {"id": p.id, "revoked": True, "streams_ended": _gate(api).sessions.revoke(p.id)}


def _gate(api: Api) -> Gate:
    if api.gate is None:
        raise NotSupported("no tickets and no keys are given out here")
    return api.gate


def _keys(api: Api) -> Keys:
    found = _gate(api).keys
    if found is None:
        raise NotSupported("no keys are kept here", hint="It needs a data directory.")
    return found


def _scopes(given: list[str]) -> tuple[Scope, ...]:
    try:
        return scopes_of(given)
    except ValueError:
        raise InvalidRequest(
            "`scopes` has an empty text", hint='Send ["shop", "main.orders"], or leave it out.'
        ) from None


def _check_within(who: Principal, scopes: tuple[Scope, ...] | None) -> None:
    if scopes is None and who.scopes is not None:
        raise Forbidden("a key without scopes reaches further than the caller", hint="Name scopes.")
    for scope in scopes or ():
        who.check(scope.db, scope.tables or None)


def _unknown(api: Api, scopes: tuple[Scope, ...]) -> list[str]:
    """Of `scopes`, which the caller may know of, those that name nothing that is there now."""
    found, there = [], api.databases.names()
    for scope in scopes:
        if scope.db not in there:
            found += _texts(scope)
        elif scope.tables:
            with suppress(HeadwaterError):  # of a database that does not answer nothing is known
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
    found: dict[str, Any] = {"id": key.id, "name": key.name, "role": key.role, "created_ms": key.created_ms}
    if key.scopes is not None:
        found["scopes"] = [text for scope in key.scopes for text in _texts(scope)]
    if key.until_ms is not None:
        found["expires_at_ms"] = key.until_ms
    return found
