"""Table shapes read from SQLite's schema: columns, keys, and every UNIQUE rule that a REPLACE can break."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

import apsw
import msgspec

from headwater.model.table import Column, Table
from headwater.sources.sqlite.connection import OURS, ROWID_NAMES, ident
from headwater.sources.sqlite.query.syntax.lexer import folded, name_of, named, tokens
from headwater.sources.sqlite.types import kind_of

PLAIN_COLLATIONS = frozenset({"BINARY", "NOCASE", "RTRIM"})


class Unique(msgspec.Struct, frozen=True):
    """One UNIQUE rule: SQL expressions over the table's columns, their collations, and a partial WHERE."""

    terms: tuple[str, ...]
    collations: tuple[str, ...]
    where: str = ""


class Numbered(msgspec.Struct, frozen=True):
    """The INTEGER PRIMARY KEY of a table, and the UNIQUE rules that are computed from the key.

    `inputs` and `generated`: the other columns that these rules use. The generated ones are in steps, with their
    expressions, which use only columns of earlier steps.
    """

    key: str
    autoincrement: bool
    rules: tuple[Unique, ...]
    inputs: tuple[str, ...]
    generated: tuple[tuple[tuple[str, str], ...], ...]


class Shape(msgspec.Struct, frozen=True):
    """A table with the facts that its triggers depend on."""

    table: Table
    rowid: str | None  # a name that refers to the rowid; None for WITHOUT ROWID
    uniques: tuple[Unique, ...]  # in addition to the key
    numbered: Numbered | None = None

    @property
    def spare_rowid(self) -> str | None:
        """Return the rowid if it is not the key: an explicit rowid can collide, too."""
        key = [column for column in self.table.columns if column.name in self.table.key]
        return None if any(column.auto or column.hidden for column in key) else self.rowid

    @property
    def key_is_plain(self) -> bool:
        """Return whether Python can compare keys for equality as SQLite does."""
        names = set(self.table.key)
        return all(c.collation in PLAIN_COLLATIONS for c in self.table.columns if c.name in names)


# `temp.` in all our statements: a table of the user may have the name of a table function, and this skips it.
def table_names(db: apsw.Connection) -> list[str]:
    """Return the user's ordinary tables: no views, no virtual tables or their shadow tables, none of ours."""
    rows = db.execute("SELECT name FROM temp.pragma_table_list WHERE schema = 'main' AND type = 'table' ORDER BY name")
    return [name for (name,) in rows if not name.startswith(("sqlite_", OURS))]


def virtual_names(db: apsw.Connection) -> list[str]:
    """Return the virtual tables, on which SQLite allows no triggers."""
    rows = db.execute("SELECT name FROM temp.pragma_table_list WHERE schema = 'main' AND type = 'virtual' ORDER BY 1")
    return [name for (name,) in rows]


def read_shape(db: apsw.Connection, name: str, kinds: Mapping[str, str] | None = None) -> Shape:
    """Return the current shape of table `name`; `kinds` gives kinds that the declared types do not express."""
    text = 'SELECT name, type, "notnull", pk, hidden FROM temp.pragma_table_xinfo(?) ORDER BY cid'
    info = list(db.execute(text, (name,)))
    key = tuple(column for column, _, _, pk, _ in sorted(info, key=lambda row: row[3]) if pk)
    rowid = _rowid_name(db, name, {column.lower() for column, *_ in info})
    indexed = bool(list(db.execute("SELECT 1 FROM temp.pragma_index_list(?) WHERE origin = 'pk'", (name,))))
    columns = tuple(
        Column(
            name=column,
            kind=(kinds or {}).get(column) or kind_of(declared),
            declared=declared,
            nullable=not notnull,
            generated=hidden in (2, 3),
            auto=bool(pk and rowid and not indexed),  # a key without an index of its own is the rowid
            collation=(db.column_metadata("main", name, column)[1]).upper(),
        )
        for column, declared, notnull, pk, hidden in info
        if hidden != 1
    )
    if not key:
        if rowid is None:  # columns use every name of the rowid, so rows cannot be identified
            return Shape(Table(name, columns), None, ())
        columns = (*columns, Column(rowid, kind="i64", hidden=True, nullable=False))
        key = (rowid,)
    uniques = tuple(_uniques(db, name))
    return Shape(Table(name, columns, key), rowid, uniques, _numbered(db, name, columns, uniques))


def _rowid_name(db: apsw.Connection, name: str, taken: set[str]) -> str | None:
    (without,) = next(db.execute("SELECT wr FROM temp.pragma_table_list(?) WHERE schema = 'main'", (name,)))
    return None if without else next((n for n in ROWID_NAMES if n not in taken), None)


def _uniques(db: apsw.Connection, name: str) -> Iterator[Unique]:
    indexes = db.execute("SELECT name FROM temp.pragma_index_list(?) WHERE \"unique\" AND origin <> 'pk'", (name,))
    for (index,) in list(indexes):
        terms = _terms(db, index)
        (sql,) = next(db.execute("SELECT sql FROM sqlite_schema WHERE type='index' AND name=?", (index,)))
        written, where = split_index(sql) if sql else ([], "")
        yield Unique(
            terms=tuple(
                ident(column) if column is not None else written[place] for place, (column, _) in enumerate(terms)
            ),
            collations=tuple(collation for _, collation in terms),
            where=where,
        )


def _terms(db: apsw.Connection, index: str) -> list[tuple[str | None, str]]:
    """Return the column (None for an expression) and the collation of each term of an index."""
    return list(db.execute("SELECT name, coll FROM temp.pragma_index_xinfo(?) WHERE key ORDER BY seqno", (index,)))


def _numbered(
    db: apsw.Connection, name: str, columns: tuple[Column, ...], uniques: tuple[Unique, ...]
) -> Numbered | None:
    """Return the key that SQLite numbers if one of `uniques` is computed from it."""
    key = next((column.name for column in columns if column.auto), None)
    if key is None or not uniques:
        return None
    (sql,) = next(db.execute("SELECT sql FROM sqlite_schema WHERE type = 'table' AND name = ?", (name,)))
    steps = _in_steps(generated_columns(sql))
    computed = {folded(key)}
    for step in steps:
        computed |= {folded(column) for column, expression in step if named(expression) & computed}
    # A new key cannot break a rule that has the key itself as a term.
    rules = [rule for rule in uniques if ident(key) not in rule.terms and _inputs(rule) & computed]
    if not rules:
        return None
    inputs = set().union(*map(_inputs, rules))
    for step in reversed(steps):
        inputs |= {used for column, expression in step if folded(column) in inputs for used in named(expression)}
    return Numbered(
        key=key,
        autoincrement=bool(db.column_metadata("main", name, key)[4]),
        rules=tuple(rules),
        inputs=tuple(c.name for c in columns if c.name != key and not c.generated and folded(c.name) in inputs),
        generated=tuple(found for step in steps if (found := tuple(g for g in step if folded(g[0]) in inputs))),
    )


def _inputs(rule: Unique) -> set[str]:
    """Return the names in the terms of `rule`, in lower case."""
    return set().union(*map(named, rule.terms))


def generated_columns(sql: str) -> dict[str, str]:
    """Return name to expression of each generated column of a CREATE TABLE text; no pragma returns expressions."""
    found, depth, column, start = dict[str, str](), 0, "", 0
    for before, token in itertools.pairwise(tokens(sql)):
        if depth == 1 and before.text in ("(", ","):
            column = name_of(token)
        if token.text == "(":
            depth += 1
            start = token.end if depth == 2 and before.word == "AS" else start
        elif token.text == ")":
            depth -= 1
            if depth == 1 and start:
                found[column] = _without_comments(sql[start : token.start])
                start = 0
    return found


def _in_steps(generated: Mapping[str, str]) -> list[list[tuple[str, str]]]:
    """Return names and expressions in steps: a column uses only columns of earlier steps.

    `named` may find more names than SQLite, for example that of a type: what then looks like a circle is one step.
    """
    uses = {folded(name): named(expression) - {folded(name)} for name, expression in generated.items()}
    steps, left = list[list[tuple[str, str]]](), dict(generated)
    while left:
        names = {folded(name) for name in left}
        ready = [name for name in left if not uses[folded(name)] & names] or list(left)
        steps.append([(name, left.pop(name)) for name in ready])
    return steps


def key_compares_as_columns_do(db: apsw.Connection, table: Table) -> bool:
    """Return False for PRIMARY KEY (k COLLATE x) on a column of another collation, which we cannot compare."""
    own = {column.name: column.collation for column in table.columns}
    indexes = db.execute("SELECT name FROM temp.pragma_index_list(?) WHERE origin = 'pk'", (table.name,))
    terms = [term for (index,) in list(indexes) for term in _terms(db, index)]
    return all(collation.upper() == own[column] for column, collation in terms if column is not None)


_SKIP = re.compile(
    r"""'[^']*(?:''[^']*)*'|"[^"]*(?:""[^"]*)*"|`[^`]*(?:``[^`]*)*`|\[[^\]]*+(?:\]|\Z)|--[^\n]*|/\*.*?(?:\*/|\Z)""",
    re.DOTALL,
)
# A text, or a name with the dot behind it where it is a qualifier.
_NAME = re.compile(
    r"""'(?:[^']|'')*'|(?:"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^\]]*\]|(?<![\w$])[^\W\d][\w$]*)(?P<dot>\s*\.\s*)?"""
)
_ORDER = re.compile(r"(?:\s+|(?<![\w$]))(ASC|DESC)\s*$", re.IGNORECASE)


def mask(sql: str) -> str:
    """Return `sql` with each character of strings, quoted names and comments replaced by "x"."""
    return _SKIP.sub(lambda found: "x" * len(found.group()), sql)


def _without_comments(sql: str) -> str:
    """Return `sql` with a space for each comment: text copied into a longer statement must not end in a comment."""
    return _SKIP.sub(lambda found: " " if found.group().startswith(("--", "/*")) else found.group(), sql)


def _unqualified(sql: str) -> str:
    """Return `sql` with its columns as `v` for `t.v`: our triggers read the table under other names."""
    return _NAME.sub(lambda found: "" if found["dot"] else found.group(), sql)


def split_index(sql: str) -> tuple[list[str], str]:
    """Return the terms and the WHERE of a CREATE INDEX text without comments; no pragma returns expressions."""
    sql = _without_comments(sql)
    masked = mask(sql)
    opening = masked.index("(")
    terms, depth, start = [], 0, opening + 1
    for place in range(opening, len(masked)):
        char = masked[place]
        if char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        if (char == "," and depth == 1) or (char == ")" and depth == 0):
            terms.append(_ORDER.sub("", sql[start:place].strip()))
            start = place + 1
        if depth == 0:
            break
    found = re.search(r"\bWHERE\b", masked[start:], re.IGNORECASE)
    return terms, _unqualified(sql[start + found.end() :].strip()) if found else ""
