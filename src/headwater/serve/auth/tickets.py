"""Tickets: short-lived credentials for a URL, because browsers cannot send headers on streams."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from typing import Any

import msgspec

from headwater.errors import Unauthorized
from headwater.model.principal import ANONYMOUS, Principal

_SIGNATURE = hashlib.sha256().digest_size


class Tickets:
    """Makes and checks tickets. Signed with what only the holder of the credential knows, so they outlive a restart."""

    def __init__(self, credential: bytes | None, *, seconds: float) -> None:
        self._key = hashlib.blake2b(credential or b"", person=b"headwater-ticket").digest()
        self._seconds = seconds

    def create(self, who: Principal) -> dict[str, Any]:
        """A ticket for `who`, good for a short while."""
        until = time.time_ns() // 1_000_000 + int(self._seconds * 1000)
        body = msgspec.msgpack.encode((who, until))
        ticket = base64.urlsafe_b64encode(self._sign(body) + body).rstrip(b"=").decode()
        return {"ticket": ticket, "expires_at_ms": until}

    def check(self, ticket: str) -> Principal:
        """Whose ticket it is; Unauthorized when it is not ours, or too old."""
        try:
            raw = base64.b64decode(ticket + "=" * (-len(ticket) % 4), altchars=b"-_", validate=True)
            signature, body = raw[:_SIGNATURE], raw[_SIGNATURE:]
            good = hmac.compare_digest(signature, self._sign(body))
            who, until = msgspec.msgpack.decode(body, type=tuple[Principal, int]) if good else (ANONYMOUS, 0)
        except (ValueError, binascii.Error, msgspec.MsgspecError):
            good, until, who = False, 0, ANONYMOUS
        if not good or time.time_ns() // 1_000_000 >= until:
            raise Unauthorized(
                "the ticket is not one of ours, or too old", hint="Ask for a new one with security.ticket.create."
            )
        return who

    def _sign(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")
