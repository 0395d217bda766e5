"""The parameters of a query: `$1`, `$2` …, or by name `:name`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from headwater.errors import InvalidRequest
from headwater.model.literal import Value
from headwater.sources.postgres.query.statement_rules import FLOAT_ARRAYS, comment_end
from headwater.sources.postgres.values import Bound, to_bound

# Tokens without parameters are matched first. Comments nest; escapes count only in strings that allow them.
_WORD = re.compile(
    r"""(?<![\w$\x80-\U0010ffff])[eE]'[^'\\]*(?:(?:''|\\.)[^'\\]*)*'|'[^']*(?:''[^']*)*'|"[^"]*(?:""[^"]*)*"|--[^\n\r]*|/\*
    |(?<![\w$\x80-\U0010ffff])\$(?P<tag>[A-Za-z_\x80-\U0010ffff][\w\x80-\U0010ffff]*|)\$.*?(?:\$(?P=tag)\$|\Z)
    |::|(?<![\w$\x80-\U0010ffff])\$(?P<place>\d+)
    |(?<![\w\x80-\U0010ffff:]):(?P<name>[A-Za-z_]\w*)""",
    re.DOTALL | re.VERBOSE,
)
MAX_PARAMETERS = 999


class NumberedStatement(msgspec.Struct, frozen=True):
    """A statement with `$1`, `$2` …, and the name of each parameter."""

    sql: str
    names: tuple[str, ...]


def marked(sql: str) -> NumberedStatement:
    """Return `sql` with numbers for its parameters `:name`; a text that has numbers already is left unchanged."""
    places = [int(found["place"]) for found in _words(sql) if found["place"]]
    if places:
        if max(places) > MAX_PARAMETERS or min(places) < 1:
            raise InvalidRequest(f"parameters are $1 to ${MAX_PARAMETERS}", hint="Number them from $1.")
        return NumberedStatement(sql, tuple(str(place + 1) for place in range(max(places))))
    names: dict[str, int] = {}
    parts: list[str] = []
    at = 0
    for found in _words(sql):
        if found["name"]:
            parts += [sql[at : found.start()], f"${names.setdefault(found['name'], len(names) + 1)}"]
            at = found.end()
    if len(names) > MAX_PARAMETERS:
        raise InvalidRequest(f"more than {MAX_PARAMETERS} parameters", hint="Pass an array as one parameter.")
    return NumberedStatement("".join([*parts, sql[at:]]), tuple(names))


def _words(sql: str) -> list[re.Match[str]]:
    found: list[re.Match[str]] = []
    at = 0
    while word := _WORD.search(sql, at):
        at = word.end()
        if word[0] == "/*":
            at = comment_end(sql, word.start())
        elif word["place"] or word["name"]:
            found.append(word)
    return found


# --- values that depend on the clock --------------------------------------------------------------------------------

# PostgreSQL reads these words as the current time, wherever a date or a time is allowed.
_CLOCK = re.compile(r"now|today|tomorrow|yesterday", re.IGNORECASE)
_CLOCK_BOUND = re.compile(_CLOCK.pattern.encode(), re.IGNORECASE)
_QUOTES = b'"\\'  # in ranges, arrays and rows, quotes may be between any two letters
# An escape, or a string that continues in the next line.
_HIDDEN = re.compile(r"\\|[uU]&'|'[^\S\n\r]*+[\n\r]\s*+'")
_LINE_OF_TEXT = re.compile(r"(?:^|\r)[^\S\n\r]*+'", re.MULTILINE)  # a string may continue after a comment
_MOMENTS = {1082, 1083, 1114, 1184, 1266, 1182, 1183, 1115, 1185, 1270}
_MOMENTS |= {3908, 3909, 3910, 3911, 3912, 3913, 4533, 4534, 4535, 6152, 6153, 6155}  # ranges of them


def is_moment(oid: int) -> bool:
    """Return whether `now` may be a value of this type: dates, times, their arrays and ranges, types of users."""
    return oid in _MOMENTS or oid >= 16384


def may_depend_on_clock(sql: str) -> bool:
    """Return whether a constant in the statement may depend on the clock."""
    if _CLOCK.search(sql.replace('"', "")) or _HIDDEN.search(sql):
        return True
    return "--" in sql and bool(_LINE_OF_TEXT.search(sql))


def bound_args(names: Sequence[str], types: Sequence[int], args: Mapping[str, Value]) -> list[Bound]:
    """Return the bound arguments; raise InvalidRequest for one that depends on the clock."""
    made: list[Bound] = []
    for name, oid in zip(names, types, strict=True):
        bound = to_bound(args[name], FLOAT_ARRAYS.get(oid, ""))
        # For any type of the value: PostgreSQL reads JSON's "now", with its quotes, as the current time.
        if bound is not None and is_moment(oid) and _CLOCK_BOUND.search(bound.translate(None, _QUOTES)):
            raise InvalidRequest(
                f"argument {name!r} is a time relative to now, so no answer can be cached",
                hint="Send the time itself.",
            )
        made.append(bound)
    return made
