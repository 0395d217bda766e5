"""SQLite's tokens, and the number it gives each parameter. Written by its own rules, not by a dialect's."""

from __future__ import annotations

import re

import msgspec

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


class Unsupported(Exception):
    """Something of a statement is not understood: its tables are depended on as a whole."""


class Token(msgspec.Struct, frozen=True):
    """A piece of the text. `word` holds a bare word in capitals, else the text of a sign."""

    kind: str  # word, quoted, str, num, blob, param, op, end
    text: str
    start: int
    end: int
    word: str = ""
    slot: int = 0  # of a parameter, from 1


def tokens(sql: str) -> list[Token]:
    """The tokens of `sql`, an `end` behind them; Unsupported where SQLite might see other ones."""
    found: list[Token] = []
    slots = _Slots()
    place = 0
    while place < len(sql):
        match = _TOKEN.match(sql, place)
        if match is None:
            raise Unsupported(f"unknown sign {sql[place]!r}")
        kind, text, start, place = str(match.lastgroup), match.group(), match.start(), match.end()
        if kind == "space":
            continue
        if kind == "num" and place < len(sql) and (sql[place].isalnum() or sql[place] in "_$"):
            raise Unsupported(f"unknown number at {text!r}")
        slot = slots.number(text) if kind == "param" else 0
        word = text.upper() if kind == "word" and text.isascii() else text if kind in ("op", "word") else ""
        found.append(Token(kind, text, start, place, word, slot))
    found.append(Token("end", "", len(sql), len(sql)))
    return found


class _Slots:
    """SQLite's numbering: `?` and a new name take the highest number so far plus one; ?5 is 5."""

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
    """Every word, quoted name and text of `sql` that may name something, folded; Unsupported as for `tokens`."""
    return {folded(name_of(token)) for token in tokens(sql) if token.kind in ("word", "quoted", "str")}


def name_of(token: Token) -> str:
    """The name a word, a quoted name or a text stands for: SQLite takes a text for a name, too."""
    return token.text[1:-1].replace("''", "'") if token.kind == "str" else unquoted(token)


def unquoted(token: Token) -> str:
    """The name a word or a quoted name stands for."""
    if token.kind == "word":
        return token.text
    mark, inside = token.text[0], token.text[1:-1]
    return inside if mark == "[" else inside.replace(mark * 2, mark)


def is_same(name: str, other: str) -> bool:
    """Whether SQLite takes both for one name: it folds ASCII letters only."""
    return name == other or folded(name) == folded(other)


def folded(name: str) -> str:
    """`name` with its ASCII letters small."""
    return name.lower() if name.isascii() else name.encode("utf-8", "surrogatepass").lower().decode("utf-8", "replace")
