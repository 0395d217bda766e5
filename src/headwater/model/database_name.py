"""Names of databases: `main` unless another is given, and what may be called so."""

from __future__ import annotations

import re

from headwater.errors import InvalidRequest

MAIN = "main"
ALIASES = {"": MAIN, "default": MAIN}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}\Z")  # also a file name, so nothing a file system dislikes


def real_name(name: str | None) -> str:
    """The name itself, or what it is an alias of; no name is `main`."""
    return MAIN if name is None else ALIASES.get(name, name)


def check_new_name(name: str) -> str:
    """`name` if a database may be called so."""
    name = real_name(name)
    if not _NAME.match(name):
        raise InvalidRequest(
            f"{name!r} cannot name a database",
            hint="Use letters, digits and underscores, at most 63, and begin with a letter or underscore.",
        )
    return name
