"""The normal form of SQL text: equal for most texts that differ in white space and comments only.

It is safe for SQLite and PostgreSQL alike: quoted names, strings and brackets stay as they are, and white space is only
ever removed next to brackets and commas, or set around comparisons, where both databases read the same tokens.
"""

from __future__ import annotations

import re

from headwater.errors import InvalidRequest

BLANKS = " \t\n\f\r"  # white space in SQLite and in PostgreSQL

_TOKEN = re.compile(
    r"""
    (?P<blank>[ \t\n\f\r]+ | --[^\n]* | /\*(?:(?!/\*|\*/).)*\*/)   # a nested comment is none of these
  | (?P<quoted>'[^']*(?:''[^']*)*' | "[^"]*(?:""[^"]*)*" | `[^`]*(?:``[^`]*)*`)
  | (?P<word>[\w$:?.]+)
  | (?P<close>[(),])
  | (?P<operator>[-+*/<>=~!@\#%^&|`?]+)
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
# Text that the databases parse differently, or that one pass over tokens cannot parse: brackets (a name in SQLite, a
# subscript in PostgreSQL), dollar quotes, backslashes in strings, strings that continue on the next line, and carriage
# returns without a line feed (they end a comment in PostgreSQL only).
_UNSAFE = re.compile(r"\[|\$(?!\d)|\\|'[^\S\n]*+\n\s*+'|\r(?!\n)")
_COMPARISONS = frozenset({"=", "<", ">", "<=", ">=", "<>", "!=", "=="})


def normal_form(sql: str) -> str:
    """Return the text without comments and with uniform white space. Text unsafe to tokenise is only trimmed."""
    if _UNSAFE.search(sql):
        return sql.strip(BLANKS).rstrip(BLANKS + ";")
    found: list[str] = []
    has_gap = False  # white space or a comment precedes the token
    for match in _TOKEN.finditer(sql):
        token = match[0]
        if match["blank"]:
            has_gap = True
            continue
        if match["operator"] and ("--" in token or "/*" in token):  # a comment that is nested or not closed
            return sql.strip(BLANKS).rstrip(BLANKS + ";")
        if found and _is_spaced(found[-1], token, has_gap):
            found.append(" ")
        found.append(token)
        has_gap = False
    return "".join(found).rstrip(BLANKS + ";")


def _is_spaced(before: str, token: str, has_gap: bool) -> bool:
    """Return whether the normal form has a space between two tokens."""
    if before == "(" or token in ("(", ")", ","):
        return False
    if before == "," or before in _COMPARISONS:
        return True
    if token in _COMPARISONS:
        return has_gap or before[-1] not in ":?$"  # := is one token
    return has_gap


def check_text(sql: str, what: str) -> None:
    """Raise InvalidRequest if `sql`, called `what` in the error, is not Unicode or contains a NUL character."""
    try:
        sql.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"the {what} is not valid Unicode") from None
    if "\0" in sql:
        raise InvalidRequest(f"the {what} contains a NUL character", hint="Bind it as an argument.")
