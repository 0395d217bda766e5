"""Lexer for SQLite's tokens, with the number that SQLite gives each parameter. Follows SQLite's own rules."""

from __future__ import annotations

import functools
import re

import msgspec

CACHED_TEXT = 2_000  # characters of a text whose tokens are cached

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\n\f\r\ufeff]+|--[^\n]*|/\*.*?(?:\*/|\Z))
  | (?P<blob>[xX]'[0-9a-fA-F]*')
  | (?P<str>'[^']*+(?:''[^']*+)*+')
  | (?P<quoted>"[^"]*+(?:""[^"]*+)*+"|`[^`]*+(?:``[^`]*+)*+`|\[[^\]]*+\])
  | (?P<num>0[xX][0-9a-fA-F]+(?:_[0-9a-fA-F]+)*
      | (?:\d+(?:_\d+)*(?:\.(?:\d+(?:_\d+)*)?)?|\.\d+(?:_\d+)*)(?:[eE][+-]?\d+(?:_\d+)*)?)
  | (?P<param>\?\d*|[:@$][A-Za-z0-9_$\x80-\U0010ffff]+)
  | (?P<word>[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_$\x80-\U0010ffff]*)
  | (?P<op>->>|->|\|\||<<|>>|<=|>=|<>|==|!=|[-+*/%&|~<>=(),.;])
    """,
    re.VERBOSE | re.DOTALL,
)


class NotAnalysed(Exception):
    """A part of a statement that our parser does not analyse: the query then depends on its whole tables."""


class Token(msgspec.Struct, frozen=True):
    """A token. `word` is an unquoted word in capitals, or the text of an operator."""

    kind: str  # word, quoted, str, num, blob, param, op, end
    text: str
    start: int
    end: int
    word: str = ""
    slot: int = 0  # number of a parameter, from 1


def tokens(sql: str) -> tuple[Token, ...]:
    """Return the tokens of `sql` and a final `end`; raise NotAnalysed where SQLite might see other tokens."""
    return _tokens(sql) if len(sql) <= CACHED_TEXT else _tokens.__wrapped__(sql)


@functools.lru_cache(maxsize=64)  # each check of a statement reads its tokens again
def _tokens(sql: str) -> tuple[Token, ...]:
    found: list[Token] = []
    slots = _Slots()
    place = 0
    while place < len(sql):
        match = _TOKEN.match(sql, place)
        if match is None:
            raise NotAnalysed(f"unknown sign {sql[place]!r}")
        kind, text, start, place = str(match.lastgroup), match.group(), match.start(), match.end()
        if kind == "space":
            continue
        if kind == "num" and place < len(sql) and (sql[place].isalnum() or sql[place] in "_$"):
            raise NotAnalysed(f"unknown number at {text!r}")
        slot = slots.number(text) if kind == "param" else 0
        word = text.upper() if kind == "word" and text.isascii() else text if kind in ("op", "word") else ""
        found.append(Token(kind, text, start, place, word, slot))
    found.append(Token("end", "", len(sql), len(sql)))
    return tuple(found)


class _Slots:
    """SQLite's parameter numbers: `?` and a new name take the highest number so far plus one; ?5 is 5."""

    def __init__(self) -> None:
        self._highest = 0
        self._names: dict[str, int] = {}

    def number(self, text: str) -> int:
        if text.startswith("?") and text != "?":
            slot = int(text[1:])
        elif text == "?":
            slot = self._highest + 1
        else:
            slot = self._names.setdefault(text, self._highest + 1)
        self._highest = max(self._highest, slot)
        return slot


def named(sql: str) -> set[str]:
    """Return every word, quoted name and string of `sql` that may be a name, folded; NotAnalysed as for `tokens`."""
    return {folded(name_of(token)) for token in tokens(sql) if token.kind in ("word", "quoted", "str")}


def name_of(token: Token) -> str:
    """Return the name that a word, a quoted name or a string denotes: SQLite accepts a string as a name, too."""
    return token.text[1:-1].replace("''", "'") if token.kind == "str" else unquoted(token)


def unquoted(token: Token) -> str:
    """Return the name that a word or a quoted name denotes."""
    if token.kind == "word":
        return token.text
    mark, inside = token.text[0], token.text[1:-1]
    return inside if mark == "[" else inside.replace(mark * 2, mark)


def folded(name: str) -> str:
    """Return `name` with its ASCII letters in lower case: SQLite treats names as the same if these are equal."""
    return name.lower() if name.isascii() else name.encode("utf-8", "surrogatepass").lower().decode("utf-8", "replace")
