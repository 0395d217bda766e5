"""Principal: who asks. Every entry into feeds, queries and ranges takes one."""

from __future__ import annotations

import msgspec


class Principal(msgspec.Struct, frozen=True):
    """A caller: a name for the logs and a role. Scopes join it when roles do more than admit."""

    name: str
    role: str = "owner"


ANONYMOUS = Principal("anonymous")  # loopback with authentication off
ADMIN = Principal("admin")  # holds HEADWATER_TOKEN
