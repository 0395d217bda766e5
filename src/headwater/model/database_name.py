"""Names of databases: `main` is the default; some names are reserved."""

from __future__ import annotations

import re

from headwater.errors import InvalidRequest

MAIN = "main"
ALIASES = {"": MAIN, "default": MAIN}
OWN_FILES = ("subscriptions", "ranges", "queries")  # Headwater's own files <name>.db in the data folder
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}\Z")  # also a file name, so nothing a file system dislikes


def real_name(name: str | None) -> str:
    """Return `main` for None and for the aliases "" and "default"; else `name` itself."""
    return MAIN if name is None else ALIASES.get(name, name)


def check_new_name(name: str) -> str:
    """Return the real name for a new database; InvalidRequest if the name is malformed or reserved."""
    name = real_name(name)
    if not _NAME.match(name):
        raise InvalidRequest(
            f"{name!r} is not a valid database name",
            hint="Use letters, digits and underscores, at most 63, and begin with a letter or underscore.",
        )
    if is_reserved(name):
        raise InvalidRequest(f"{name!r} is reserved for a file of Headwater's own", hint="Choose another name.")
    return name


def is_reserved(name: str) -> bool:
    """Return whether the file of an embedded database of that name would be one of Headwater's own."""
    return name.lower() in OWN_FILES  # on some file systems names that differ in case only are one file
