"""The names in a predicate's text, by their position: types, collations, functions. Pure.

A predicate with the name of an unknown type is refused before PostgreSQL reads it: so the refusal is the same whether a
type, or a table with a row type, of that name exists or not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec

from headwater.sources.postgres.query.analysis.statement_growth import tokens

_CATALOG = "pg_catalog"
# Types by their names in SQL. PostgreSQL's grammar reserves these words, unless they are quoted.
_SQL_TYPES = frozenset(
    ("int", "integer", "smallint", "bigint", "real", "float", "double", "decimal", "dec", "numeric", "boolean", "char")
    + ("character", "varchar", "nchar", "national", "bit", "time", "timestamp", "interval", "json")
)
_BEFORE_TYPE = frozenset({"as", "returning", "setof"})
# Words before a text constant that are not the type of the constant, and the words that come before them.
_VARYING = frozenset({"character", "char", "nchar", "bit"})
_LITERAL_PREFIXES = frozenset({"b", "x", "n"})
_OPERATORS_BY_NAME = frozenset({"like", "ilike", "overlaps"})


class KnownNames(msgspec.Struct, frozen=True):
    """The names that a predicate on a table may contain, whatever else the database holds."""

    columns: Collection[str]  # of the table, and the fields of its composite columns
    types: Collection[tuple[str, str]]  # schema and name: built-in ones, those of extensions and of the columns
    functions: Collection[str]  # built-in ones
    collations: Collection[str]
    keywords: Collection[str]  # those that cannot be the name of a function or a type


class _Token(msgspec.Struct, frozen=True):
    kind: str  # word, name, text, sign
    text: str  # names as PostgreSQL folds them
    start: int
    is_joined: bool  # a text follows without a space: x'ff'


_END = _Token("end", "", -1, False)


def has_foreign_type(where: str, known: KnownNames) -> bool:
    """Return whether the text contains the name of a type or a collation that is not known."""
    found = _tokens(where)
    names = {name for _, name in known.types}
    for place, before, parts, after in _dotted_names(found):
        if before.text == "." and before.kind == "sign":
            continue  # a field
        first = parts[0]
        if before.kind == "word" and before.text == "collate":
            is_known = parts[-1].text in known.collations and (len(parts) == 1 or first.text == _CATALOG)
        elif _is_before_type(found, place):
            if first.kind == "word" and first.text == "setof":
                continue
            is_known = _is_type(parts, known, names)
        elif after.kind == "text" and not first.is_joined:
            is_known = _is_type(parts, known, names) or _is_word_before_text(before, parts, known)
        else:
            continue
        if not is_known:
            return True
    return False


def has_own_calls(where: str, known: KnownNames) -> bool:
    """Return whether the text may call functions that are not built in, also as `row.function`."""
    found = _tokens(where)
    for place, before, parts, after in _dotted_names(found):
        is_field = before.kind == "sign" and before.text == "."
        last = parts[-1]
        if after.kind == "sign" and after.text == "(":
            if len(parts) > 1 or is_field:
                is_known = not is_field and parts[0].text == _CATALOG and last.text in known.functions
            else:
                is_word = last.kind == "word" and (last.text in known.keywords or last.text in _OPERATORS_BY_NAME)
                is_known = is_word or last.text in known.functions or _is_before_type(found, place)
        else:
            is_known = not (is_field or len(parts) > 1) or last.text in known.columns or _is_before_type(found, place)
        if not is_known:
            return True
    return False


def _tokens(where: str) -> list[_Token]:
    found = list(tokens(where))
    made = []
    for place, (kind, text, start) in enumerate(found):
        is_joined = False
        if kind == "word":
            follows = found[place + 1] if place + 1 < len(found) else ("", "", -1)
            is_joined = text.lower() in _LITERAL_PREFIXES and follows[0] == "text" and follows[2] == start + len(text)
            text = text.lower()
        elif kind == "name":
            text = text.removeprefix('"').removesuffix('"').replace('""', '"')
        made.append(_Token(kind, text, start, is_joined))
    return made


def _dotted_names(found: Sequence[_Token]) -> Iterator[tuple[int, _Token, list[_Token], _Token]]:
    """Yield each name once: its place, the token before it, its parts between dots, and the token after it."""
    end = 0
    for place, token in enumerate(found):
        if place < end or token.kind not in ("word", "name"):
            continue
        end, parts = place + 1, [token]
        while (
            end + 1 < len(found)
            and found[end].kind == "sign"
            and found[end].text == "."
            and found[end + 1].kind in ("word", "name")
        ):
            parts.append(found[end + 1])
            end += 2
        yield place, found[place - 1] if place else _END, parts, found[end] if end < len(found) else _END


def _is_before_type(found: Sequence[_Token], place: int) -> bool:
    """Return whether the grammar has a type at `place`: after `::`, AS, RETURNING, SETOF."""
    before = found[place - 1] if place else _END
    if before.kind == "word":
        return before.text in _BEFORE_TYPE
    return place > 1 and all(each.kind == "sign" and each.text == ":" for each in found[place - 2 : place])


def _is_type(parts: Sequence[_Token], known: KnownNames, names: Collection[str]) -> bool:
    last = parts[-1]
    if len(parts) == 1:
        return last.text in names or (last.kind == "word" and last.text in _SQL_TYPES)
    return len(parts) == 2 and (parts[0].text, last.text) in known.types


def _is_word_before_text(before: _Token, parts: Sequence[_Token], known: KnownNames) -> bool:
    """Return whether a text after this word is not a constant of a type: `LIKE 'a'`, `AT TIME ZONE 'UTC'`."""
    word = parts[0]
    if len(parts) > 1 or word.kind != "word":
        return False
    match word.text:
        case "zone":
            return before.text == "time"
        case "varying":
            return before.text in _VARYING
        case "escape":
            return before.kind in ("text", "name", "word") or before.text in (")", "]")
        case "uescape":
            return before.kind == "text"
    return word.text in known.keywords or word.text in _OPERATORS_BY_NAME
