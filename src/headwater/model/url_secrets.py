"""Passwords and other secrets in URLs, which no output may repeat."""

from __future__ import annotations

import re
from urllib.parse import unquote

HIDDEN = "***"
_LOGIN = re.compile(r"(://[^:@/?]*:).*@|(://[^:/?]*:)[^/?]*@", re.DOTALL)
_NAME = re.compile(r"([^?;=\s]+)=")
# libpq, PyMySQL and JDBC have such parameters. `passfile` and `sslkey` name files.
_SECRET = re.compile(r"password|passwd|pwd|passphrase|secret|token|scram_", re.IGNORECASE)


def without_secrets(url: str) -> str:
    """Return `url` for output, with `***` in place of the password and of every secret parameter.

    If the end of a secret is ambiguous because it is not escaped, `***` replaces more than the secret.
    """
    shown = _LOGIN.sub(lambda found: f"{found[1] or found[2]}{HIDDEN}@", url)
    return "&".join(map(_without_value, shown.split("&")))


def has_secrets(url: str) -> bool:
    """Return whether `url` has a password or a secret parameter."""
    return without_secrets(url) != url


def _without_value(parameter: str) -> str:
    for found in _NAME.finditer(parameter):
        if _SECRET.search(unquote(found[1])):
            return parameter[: found.end()] + HIDDEN
    return parameter
