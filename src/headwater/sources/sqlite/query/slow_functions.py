"""Built-in functions whose cost is the product of two lengths: limits for small values, linear replacements above.

SQLite calls its progress handler between the steps of a program, never inside one, so that one call of instr() with two
long texts runs for minutes, regardless of its statement's time limit. A callback into Python for every call would be
exact and linear, but each callback waits for the interpreter's lock, which other threads hold: a scan with LIKE would
become a hundred times slower under load. So a statement that calls one of these functions first runs with a limit on
the length of its values under which the slowest call takes less than a millisecond, then with a limit for 10 ms and
more checks of the clock. Only if a value is longer does the statement run again with linear functions in Python,
which check the clock, and with a check of the clock after every few steps.

JSON functions have the same tiers, by their arguments: each path is searched from the beginning of the document. All
limits are lower for a statement with many calls, because one row may contain all of them without a check.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any

import apsw
import msgspec

from headwater.errors import InvalidRequest
from headwater.sources.sqlite.query.statement_cost import BY_ARGUMENTS, Cost, call_weight

_KIB, _MIB = 1 << 10, 1 << 20
SHORTEST = 128  # bytes; the lowest limit of any tier
# Longest values, in bytes, for which the built-in function takes 0.5 ms and 10 ms, measured with the worst operands.
_SLOW = {
    **dict.fromkeys(("trim", "ltrim", "rtrim", "unhex"), (_KIB // 2, 2 * _KIB)),
    **dict.fromkeys(("json_patch", "jsonb_patch", "geopoly_overlap", "geopoly_within"), (2 * _KIB, 8 * _KIB)),
    **dict.fromkeys(("like", "glob"), (2 * _KIB, 32 * _KIB)),
    **dict.fromkeys(("instr", "replace"), (8 * _KIB, 32 * _KIB)),
    "snippet": (_KIB // 2, 2 * _KIB),  # it compares every match in a row with every other
    "highlight": (4 * _KIB, 16 * _KIB),
}
SLOW = frozenset(_SLOW)
_PATTERNS = frozenset({"like", "glob"})
_LINEAR = frozenset({"trim", "ltrim", "rtrim", "unhex", "instr", "replace"})
# Python cannot return values with a subtype or of a virtual table: above this length these functions are refused.
CAP = 64 * _KIB
_CAPPED = {
    **dict.fromkeys(("json_patch", "jsonb_patch", "geopoly_overlap", "geopoly_within", "snippet"), CAP),
    "highlight": 8 * CAP,
}
PATTERN = 500  # bytes of a LIKE or GLOB pattern, each of which may be compared with every byte of the text
SHORT_PATTERN = 200  # the same limit where the clock is rarely checked
LONG_PATTERN = 100  # for long texts of at most 1 MiB
LONGER_PATTERN, LONGEST_PATTERN = 50, 16  # for texts of at most 8 MiB, and for longer ones
FEW_CALLS = 8  # calls of slow functions per row; with more calls the limits are lower
TOO_COMPLEX = "LIKE or GLOB pattern too complex"  # SQLite's error for a longer pattern
SHORT_SET = 16  # characters for which Python's strip is faster than a loop
MAX_SOUGHT = 1 << 20  # characters or bytes of the search term: more would block other threads
PIECE = 1 << 20  # characters or bytes searched without a pause for other threads
SPLIT = 1 << 16  # bytes split at each match without a pause: every byte may become an object
MAX_PRODUCT = 1 << 24  # maximum product of two lengths for the built-in unhex(X, Y)


class StatementLimits(msgspec.Struct, frozen=True):
    """Limits of a statement, so that no call of a slow function takes long."""

    length: int | None  # maximum bytes of a value or a row; None is the connection's own limit
    steps: int  # virtual machine steps between two checks of the clock
    pattern: int = PATTERN
    linear: bool = False  # the linear functions replace the built-in ones


def tiers_of(functions: frozenset[str], cost: Cost = Cost()) -> tuple[StatementLimits, ...]:  # noqa: B008
    """Return the limits to try in turn for a statement that calls `functions`; none if no function is slow.

    Each tier is for values that are too long for the previous one.
    """
    slow, by_arguments = _SLOW.keys() & functions, BY_ARGUMENTS & functions
    if not slow and not by_arguments:
        return ()
    lengths = [_lengths(_SLOW[name], cost.slow_calls) for name in slow]
    if by_arguments:
        lengths.append(_json_lengths(cost.arguments))
    short, longer, long = (min(length[place] for length in lengths) for place in range(3))
    first = (StatementLimits(short, 20_000, SHORT_PATTERN, False), StatementLimits(longer, 1_000, PATTERN, False))
    linear = not slow.isdisjoint(_LINEAR)
    if found := slow & _CAPPED.keys():
        cap = min(_CAPPED[name] for name in found)
        return (*first, StatementLimits(cap // max(cost.slow_calls, 1), 3, LONG_PATTERN, linear))
    third = StatementLimits(long, 100, LONG_PATTERN, linear)
    if slow.isdisjoint(_PATTERNS):
        return (*first, third, StatementLimits(None, 3, LONGEST_PATTERN, linear))
    fourth = StatementLimits(max(long, 8 * _MIB // _share(cost.slow_calls)), 20, LONGER_PATTERN, linear)
    return (*first, third, fourth, StatementLimits(None, 3, LONGEST_PATTERN, linear))


def _share(calls: int) -> int:
    return max(-(-calls // FEW_CALLS), 1)


def _lengths(measured: tuple[int, int], calls: int) -> tuple[int, int, int]:
    short, longer = measured
    share = _share(calls)
    return max(short // share, SHORTEST), max(longer // share, SHORTEST), max(_MIB // share, SHORTEST)


def _json_lengths(arguments: int) -> tuple[int, int, int]:
    """Return the lengths for which a call takes 0.5 ms, 10 ms and 100 ms."""
    weight = call_weight("json_set", arguments)
    short, longer, long = (max(nanoseconds // weight, SHORTEST) for nanoseconds in (500_000, 10_000_000, 100_000_000))
    return short, longer, min(long, 8 * _MIB)


def capped(functions: frozenset[str]) -> str | None:
    """Return the function with the lowest limit on the length of values, if there is one."""
    return min(_CAPPED.keys() & functions, key=lambda name: (_CAPPED[name], name), default=None)


class LinearFunctions:
    """Replacements of built-in functions on one connection: equal to SQLite's, except that invalid UTF-8 text fails.

    A second argument longer than MAX_SOUGHT is refused.
    `check` raises once the time of the statement is up.
    """

    def __init__(self, db: apsw.Connection, check: Callable[[], None]) -> None:
        self._db, self._check = db, check
        self._builtin = apsw.Connection(":memory:")
        made: dict[tuple[str, int], Callable[..., Any]] = {
            ("instr", 2): self.instr,
            ("replace", 3): self.replace,
            ("trim", 2): lambda text, chars: self.trim(text, chars, True, True),
            ("ltrim", 2): lambda text, chars: self.trim(text, chars, True, False),
            ("rtrim", 2): lambda text, chars: self.trim(text, chars, False, True),
            ("unhex", 2): self.unhex,
        }
        for (name, arguments), function in made.items():
            db.create_scalar_function(name, function, arguments, deterministic=True, flags=apsw.SQLITE_INNOCUOUS)

    def instr(self, hay: Any, needle: Any) -> int | None:
        """Return the position of `needle` in `hay`, from one: in bytes for two blobs, else in characters."""
        self._check()
        if hay is None or needle is None:
            return None
        _check_sought("instr", needle)
        is_text = not (isinstance(hay, bytes) and isinstance(needle, bytes))
        where, what = self._bytes(hay), self._bytes(needle)
        if not what:
            return 1
        if is_text and what[0] in _INSIDE:
            return int(where.startswith(what))  # later, SQLite compares only at starts of characters
        found = self._find(where, what)
        if found < 0:
            return 0
        return found + 1 if not is_text else len(where[1 : found + 1].translate(None, _INSIDE)) + 1

    def replace(self, text: Any, old: Any, new: Any) -> str | None:
        """Return `text` with `new` for every `old`."""
        self._check()
        if text is None or old is None:
            return None
        _check_sought("replace", old)
        whole, what = self._bytes(text), self._bytes(old)
        if not what or what[0] == 0:  # SQLite treats a pattern that begins with NUL as empty
            return whole.decode()
        if new is None:
            return None
        return self._replaced(whole, what, self._bytes(new))

    def _replaced(self, whole: bytes, what: bytes, into: bytes) -> str:
        """Return `whole` with `into` for every `what`, piece by piece, so that other threads run in between."""
        most, size, start = self._db.limit(apsw.SQLITE_LIMIT_LENGTH), 0, 0
        decoder, made = codecs.getincrementaldecoder("utf-8")(), []
        step = max(SPLIT, 2 * len(what))
        while start < len(whole):
            self._check()
            *found, tail = whole[start : start + step].split(what)
            start += step
            if start < len(whole):  # the next match may begin in this piece
                kept = min(len(what) - 1, len(tail))
                tail, start = tail[: len(tail) - kept], start - kept
            piece = into.join([*found, tail])
            size += len(piece)
            if size > most:
                raise apsw.TooBigError("string or blob too big")
            made.append(decoder.decode(piece))
        return "".join(made) + decoder.decode(b"", final=True)

    def trim(self, text: Any, chars: Any, left: bool, right: bool) -> str | None:
        """Return `text` without the characters `chars` at its ends."""
        self._check()
        if text is None or chars is None:
            return None
        _check_sought("trim", chars)
        whole = self._bytes(text).decode()
        drop = frozenset(self._bytes(chars).decode().split("\0", 1)[0])
        if not drop:
            return whole
        start = self._leading(whole, drop) if left else 0
        end = len(whole) - (self._leading(whole[::-1], drop) if right else 0)
        return whole[start : max(start, end)]

    def _find(self, where: bytes, what: bytes) -> int:
        for start in range(0, len(where), PIECE):
            self._check()
            found = where.find(what, start, start + PIECE + len(what) - 1)
            if found >= 0:
                return found
        return -1

    def _leading(self, text: str, drop: frozenset[str]) -> int:
        """Return how many characters at the beginning are in `drop`."""
        few = "".join(drop) if len(drop) <= SHORT_SET else ""
        for start in range(0, len(text), PIECE):
            self._check()
            piece = text[start : start + PIECE]
            if few:
                dropped = len(piece) - len(piece.lstrip(few))
            else:
                dropped = next((place for place, char in enumerate(piece) if char not in drop), len(piece))
            if dropped < len(piece):
                return start + dropped
        return len(text)

    def unhex(self, text: Any, ignored: Any) -> Any:
        """Return the bytes of hexadecimal `text`; raise if the built-in function would take too long."""
        self._check()
        if text is None or ignored is None:
            return None
        if len(self._bytes(text)) * len(self._bytes(ignored)) > MAX_PRODUCT:
            raise apsw.TooBigError("string or blob too big")
        return self._ask("SELECT unhex(?, ?)", text, ignored)

    def _bytes(self, value: Any) -> bytes:
        match value:
            case bytes():
                return value
            case str():
                return value.encode()
            case _:
                return str(self._ask("SELECT CAST(? AS TEXT)", value)).encode()

    def _ask(self, sql: str, *values: Any) -> Any:
        ((found,),) = self._builtin.execute(sql, values).fetchall()
        return found


_INSIDE = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that do not begin a character


def _check_sought(name: str, value: Any) -> None:
    if isinstance(value, str | bytes) and len(value) > MAX_SOUGHT:
        raise InvalidRequest(
            f"the second argument of {name}() is longer than {MAX_SOUGHT} characters", hint="Search for a shorter text."
        )
