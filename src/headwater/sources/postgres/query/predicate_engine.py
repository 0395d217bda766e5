"""Evaluation of predicates by PostgreSQL itself: of their text once, and of rows in batches.

The text becomes a constraint of a temporary table that is rolled back: so PostgreSQL ensures that it reads a single
row, and reports its columns, its functions and its normal form, without computing anything. The normal form, not the
caller's text, is evaluated on rows, on a connection that only reads. It must use IMMUTABLE functions only: PostgreSQL
checks that when it becomes the predicate of an index, which computes constants, so only after the other checks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import msgspec

from headwater.errors import Busy, Forbidden, HeadwaterError, InvalidRequest, NotSupported, SourceError
from headwater.model.table import Row, Table
from headwater.sources.postgres.errors import CANCELED, fault, state_of
from headwater.sources.postgres.protocol_session import WORDS, Link, Pool
from headwater.sources.postgres.query.analysis.immutable_functions import CATALOG_READERS, TRUSTED
from headwater.sources.postgres.query.analysis.parse_tree import UnsupportedTree, parse
from headwater.sources.postgres.query.analysis.parse_tree_source import MAX_TREE
from headwater.sources.postgres.query.analysis.statement_growth import check_text
from headwater.sources.postgres.query.analysis.tree_reads import TYPE_FIELDS
from headwater.sources.postgres.query.analysis.volatile_calls import has_mutable_calls
from headwater.sources.postgres.query.predicate_names import KnownNames, has_foreign_type, has_own_calls
from headwater.sources.postgres.schema.relations import split_name
from headwater.sources.postgres.schema.table_shapes import ident
from headwater.sources.postgres.types import BPCHAR, TEXT, VARCHAR
from headwater.sources.postgres.values import Bound, array_text, to_text
from headwater.sources.request_checks import check_predicate

BATCH = 1_000  # rows evaluated at a time
SECONDS = 2.0  # time limit of a batch
_PLACE = "_headwater_place"
_TYPES = """
WITH RECURSIVE up(name, oid, base) AS (
  SELECT name, to_regtype(name)::oid, (SELECT typbasetype FROM pg_type WHERE oid = to_regtype(name))
  FROM unnest($1::text[]) AS name
  UNION ALL SELECT name, base, (SELECT typbasetype FROM pg_type WHERE oid = up.base) FROM up WHERE base <> 0)
SELECT name, format_type(oid, -1), oid FROM up WHERE base = 0
"""
_PROBE = """
FROM pg_constraint c WHERE c.conname = '_headwater_probe' AND c.conrelid = $1::regclass"""
_READ = f"SELECT pg_get_expr(c.conbin, c.conrelid) {_PROBE}"
_COLUMNS = f"""
SELECT a.attname FROM pg_attribute a WHERE a.attrelid = $1::regclass AND a.attnum = ANY (
  ARRAY(SELECT unnest(c.conkey) {_PROBE}))
"""
_TREE = f"SELECT CASE WHEN length(c.conbin::text) <= {MAX_TREE} THEN c.conbin::text END {_PROBE}"
_COLLATIONS = """
SELECT DISTINCT ON (c.collname) c.collname, n.nspname FROM pg_collation c JOIN pg_namespace n ON n.oid = c.collnamespace
WHERE c.collname = ANY ($1::text[]) AND c.collencoding IN (-1, pg_char_to_encoding(getdatabaseencoding()))
ORDER BY c.collname, pg_collation_is_visible(c.oid) DESC, n.nspname
"""
_USES = f"d.classid = 'pg_constraint'::regclass AND d.objid = (SELECT c.oid {_PROBE})"
# The types of the table's columns, and the types inside them. $1 is the temporary table, $2 the declared types.
_OWN = """own (oid) AS (
  SELECT to_regtype(name)::oid FROM unnest($2::text[]) name
  UNION SELECT inner_.oid FROM own o JOIN pg_type t ON t.oid = o.oid
  LEFT JOIN pg_range r ON t.oid IN (r.rngtypid, r.rngmultitypid) CROSS JOIN LATERAL (
    VALUES (t.typelem), (t.typarray), (t.typbasetype), (r.rngsubtype), (r.rngtypid)
    UNION ALL SELECT a.atttypid FROM pg_attribute a WHERE a.attrelid = t.typrelid AND a.attnum > 0
      AND NOT a.attisdropped) inner_ (oid)
  WHERE inner_.oid <> 0
)"""
# Other types of users in the predicate: row types reveal that a relation exists, and its columns; enums and domains
# reveal facts about the tables that use them. The tree contains types that pg_depend lacks, such as of ARRAY[]::x[].
_TREE_TYPES = f":(?:{'|'.join((*TYPE_FIELDS, 'element_typeid', 'refcontainertype', 'refelemtype'))}) ([0-9]+)"
_FOREIGN_TYPES = f"""
WITH RECURSIVE {_OWN}, used (oid) AS (
  SELECT d.refobjid FROM pg_depend d WHERE {_USES} AND d.refclassid = 'pg_type'::regclass
  UNION SELECT m.match[1]::oid FROM (SELECT c.conbin::text {_PROBE}) tree (text),
    LATERAL regexp_matches(tree.text, '{_TREE_TYPES}', 'g') m (match)
)
SELECT 1 FROM used u JOIN pg_type t ON t.oid = u.oid LEFT JOIN pg_type e ON e.oid = t.typelem AND e.typarray = t.oid
WHERE t.oid >= 16384 AND $1::regclass NOT IN (t.typrelid, coalesce(e.typrelid, 0)) AND (
  EXISTS (SELECT FROM pg_class c WHERE c.oid IN (t.typrelid, e.typrelid) AND c.relkind <> 'c')
  OR t.oid NOT IN (SELECT oid FROM own WHERE oid IS NOT NULL)
    AND NOT EXISTS (SELECT FROM pg_depend x WHERE x.classid = 'pg_type'::regclass AND x.deptype = 'e'
      AND x.objid IN (t.oid, t.typelem))) LIMIT 1
"""
_KNOWN = f"""
WITH RECURSIVE {_OWN.replace("$2", "$1")}
SELECT 'type', n.nspname::text, t.typname::text FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
WHERE t.oid < 16384 AND n.nspname = 'pg_catalog' AND t.typname !~ '^_?(reg|aclitem$)' OR t.oid IN (SELECT oid FROM own)
  OR EXISTS (SELECT FROM pg_depend x WHERE x.classid = 'pg_type'::regclass AND x.deptype = 'e' AND x.objid = t.oid)
UNION ALL SELECT 'column', '', a.attname::text FROM own o JOIN pg_type t ON t.oid = o.oid
JOIN pg_attribute a ON a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL SELECT DISTINCT 'function', '', p.proname::text FROM pg_proc p WHERE p.oid < 16384 OR EXISTS (
  SELECT FROM pg_depend x JOIN pg_extension e ON e.oid = x.refobjid AND e.extname = ANY ($2::text[])
  WHERE x.classid = 'pg_proc'::regclass AND x.deptype = 'e' AND x.objid = p.oid)
UNION ALL SELECT 'collation', '', c.collname::text FROM pg_collation c WHERE c.oid < 16384
  OR c.collnamespace = 'pg_catalog'::regnamespace
UNION ALL SELECT 'keyword', '', word FROM pg_get_keywords() WHERE catcode IN ('R', 'C')
"""
_OWN_CALLS = f"""
SELECT coalesce(p.proname, o.oprname)::text FROM pg_depend d
LEFT JOIN pg_proc p ON d.refclassid = 'pg_proc'::regclass AND p.oid = d.refobjid
LEFT JOIN pg_operator o ON d.refclassid = 'pg_operator'::regclass AND o.oid = d.refobjid
WHERE {_USES} AND coalesce(p.oid, o.oid) >= 16384 AND NOT EXISTS (
    SELECT FROM pg_depend e JOIN pg_extension x ON x.oid = e.refobjid
    WHERE e.classid = d.refclassid AND e.objid = d.refobjid AND e.deptype = 'e' AND x.extname = ANY ($2::text[]))
ORDER BY 1
"""
NAME = 19  # the type of names in the catalogue
# PostgreSQL evaluates these when it parses the text: at another time the predicate would be a different one.
_CLOCKS = re.compile(r"'\s*(now|today|tomorrow|yesterday|allballs)\s*'", re.IGNORECASE)


# The same refusal whether a relation exists or not: a filter must not reveal which relations exist.
_NO_SUCH_RELATION = frozenset({"42P01", "3F000", "42704"})
LOCK_MS = 1  # a predicate needs no lock of another table, and a wait for one would show that the table exists
# Every subquery contains one of these words. Its errors would reveal the tables and columns that it names.
_SUBQUERY = re.compile(r"\b(select|table|with|values)\b", re.IGNORECASE)
# Prefixes of errors raised before any name is resolved, and of those on other.column without a subquery.
_GRAMMAR = ("syntax error", "one statement")
_OTHER_TABLE = ("missing FROM-clause", "invalid reference to FROM-clause")
_NO_SUCH_COLUMN = re.compile(r'column ("[^"]*"|\S+) does not exist')
_NO_SUCH_FUNCTION = "42883"  # or operator
# Types whose constants are looked up in the catalogue.
_CATALOG_NAMES = re.compile(r"::(pg_catalog\.)?(reg[a-z]+|aclitem\b)", re.IGNORECASE)
_CATALOG_CALLS = re.compile(rf"\b({'|'.join(sorted(CATALOG_READERS))})\(")
_TEXTS = re.compile(r"'[^']*(?:''[^']*)*'")
# Errors that name the type of a constant.
_BAD_CONSTANT = re.compile(r"(?:invalid input value for enum|value for domain|domain) (\S+?)[ :]")


def _one_row_only() -> NotSupported:
    return NotSupported(
        "a predicate reads one row: it has no subqueries and names no other relation",
        hint="Use only columns of this table.",
    )


def _not_immutable() -> NotSupported:
    return NotSupported(
        "a function in the predicate depends on more than its arguments", hint="Compare with a constant."
    )


class NormalPredicate(msgspec.Struct, frozen=True):
    """A predicate in PostgreSQL's normal form, the columns that it reads, and the functions that it calls."""

    text: str
    columns: tuple[str, ...]
    calls: tuple[str, ...] = ()  # functions and operators that are not built in


class Engine:
    """The evaluation of predicates on rows of a table shape. Thread-safe."""

    def __init__(self, table: Table, pool: Pool, *, seconds: float = SECONDS) -> None:
        self.table = table
        self._pool, self._seconds = pool, seconds
        parts = split_name(table.name)
        self._name = ident(parts[1] if parts else table.name)
        self._types = pool.read(self._named_types)
        self._collations = pool.read(self._named_collations)
        self._known = pool.read(self._known_names)

    def _named_types(self, link: Link) -> dict[str, tuple[str, int]]:
        """Return the SQL names of the existing types, with domains resolved and without length limits."""
        found = link.run(_TYPES, [array_text(self._declared())]).values()
        return {name: (text, oid) for name, text, oid in found if text is not None and text != "-"}

    def _declared(self) -> list[str]:
        return sorted({column.declared for column in self.table.columns})

    def _named_collations(self, link: Link) -> dict[str, str]:
        """Return the SQL names of collations; a collation that is missing here is the database's default."""
        names = sorted({column.collation for column in self.table.columns})
        found = link.run(_COLLATIONS, [array_text(names)]).texts()
        return {str(name): f"{ident(str(schema))}.{ident(str(name))}" for name, schema in found}

    def _known_names(self, link: Link) -> KnownNames:
        """Return the names that predicates may contain, whatever tables, types and functions exist."""
        found: dict[str, set[tuple[str, str]]] = {}
        params = [array_text(self._declared()), array_text(sorted(TRUSTED))]
        for kind, schema, name in link.run(_KNOWN, params).texts():
            found.setdefault(str(kind), set()).add((str(schema), str(name)))
        parts = split_name(self.table.name)
        types = found["type"] | {("pg_temp", parts[1] if parts else self.table.name)}  # its own row type
        names = {kind: frozenset(name for _, name in each) for kind, each in found.items()}
        return KnownNames(
            columns=names.get("column", frozenset()).union(self.table.names),
            types=frozenset(types),
            functions=names["function"],
            collations=names["collation"] | {column.collation for column in self.table.columns},
            keywords=names["keyword"],
        )

    def type_of(self, name: str) -> int:
        """Return the oid of a column's base type; 0 if the type was dropped."""
        return self._types.get(self.table.columns[self.table.index[name]].declared, ("", 0))[1]

    # --- the text ----------------------------------------------------------------------------------------

    def examine(self, where: str) -> NormalPredicate:
        """Return the predicate in normal form; InvalidRequest or NotSupported if it is not a predicate on one row."""
        check_predicate(where)
        check_text(where)
        if has_foreign_type(where, self._known):
            raise self._marked(_one_row_only(), where)

        def probe(link: Link) -> NormalPredicate:
            self._make_table(link)
            link.run(f"SET LOCAL lock_timeout = {LOCK_MS}")
            # First without brackets: `1) OR (1` is no expression. The statement is parsed, but not planned.
            if link.prepare(f"SELECT 1 FROM {self._name} WHERE\n{where}\n"):
                raise InvalidRequest("a predicate has no parameters", hint="Write the value itself.")
            return self._understood(link, where)

        try:
            found = self._pool.probe(probe, self._seconds)
        except HeadwaterError as error:
            raise self._marked(self._refusal(error, where), where, state_of(error)) from None
        for clock in _CLOCKS.finditer(where):
            if f"{clock[0]}::text" not in found.text and f"{clock[0]}::character varying" not in found.text:
                raise NotSupported(f"{clock[0]} depends on the current time", hint="Write the time itself.")
        return found

    def _marked(self, refusal: HeadwaterError, where: str, state: str = "") -> HeadwaterError:
        """Return `refusal`, marked if it might be another one with a function or an operator of users."""
        refusal.depends_on_functions = state == _NO_SUCH_FUNCTION or has_own_calls(where, self._known)
        return refusal

    def reread(self, texts: Sequence[str]) -> list[str]:
        """Return PostgreSQL's normal form of each of `texts`, which are ours; [] if it refuses one."""

        def probe(link: Link) -> list[str]:
            self._make_table(link)
            return [self._stored(link, text).text for text in texts]

        try:
            return self._pool.probe(probe, self._seconds)
        except InvalidRequest:
            return []

    def _make_table(self, link: Link) -> None:
        columns = []
        for column in self.table.columns:
            found = self._types.get(column.declared)
            if found is not None:  # a column whose type was dropped can be in no predicate
                collate = self._collation(column.collation, found[1])
                columns.append(f"{ident(column.name)} {found[0]}{collate}")
        link.run(f"CREATE TEMP TABLE {self._name} ({', '.join(columns)}) ON COMMIT DROP")

    def _collation(self, name: str, oid: int) -> str:
        """Return the COLLATE clause of a column; "C" for bytewise collations."""
        if oid not in (TEXT, BPCHAR, VARCHAR, NAME):
            return ""
        found = _BYTES.get(name) or self._collations.get(name)
        return "" if found is None else f" COLLATE {found}"

    def _stored(self, link: Link, where: str) -> NormalPredicate:
        """Return PostgreSQL's normal form of the predicate, without computing any part of it."""
        name = [f"pg_temp.{self._name}".encode()]
        link.run(
            f"ALTER TABLE pg_temp.{self._name} ADD CONSTRAINT _headwater_probe CHECK (\n{where}\n) NOT VALID",
            max_bytes=WORDS,
        )
        ((text,),) = link.run(_READ, name, max_bytes=WORDS).values()
        names = {str(column) for (column,) in link.run(_COLUMNS, name).texts()}
        calls = tuple(str(call) for (call,) in link.run(_OWN_CALLS, [*name, array_text(sorted(TRUSTED))]).texts())
        bare = _TEXTS.sub("''", text)
        if _CATALOG_NAMES.search(bare) or _CATALOG_CALLS.search(bare):
            raise _one_row_only()
        if link.run(_FOREIGN_TYPES, [*name, array_text(self._declared())]).rows:
            raise _one_row_only()
        if calls:
            self._check_immutable(link, name)
        link.run(f"ALTER TABLE pg_temp.{self._name} DROP CONSTRAINT _headwater_probe")
        if ".*" in text:
            names = {*self.table.names}
        return NormalPredicate(text, tuple(each for each in self.table.names if each in names), calls)

    def _check_immutable(self, link: Link, name: Sequence[Bound]) -> None:
        """Refuse a predicate with functions of users that are not IMMUTABLE, without calling any of them."""
        ((tree,),) = link.run(_TREE, name).texts()
        try:
            is_mutable = tree is None or has_mutable_calls(link, parse(tree))
        except (UnsupportedTree, RecursionError):
            is_mutable = True
        if is_mutable:
            raise _not_immutable()

    def _understood(self, link: Link, where: str) -> NormalPredicate:
        found = self._stored(link, where)
        if not found.calls:
            # PostgreSQL computes constants here: a user's function could read any table, and its errors reveal data.
            link.run(f"CREATE INDEX ON pg_temp.{self._name} ((1)) WHERE (\n{where}\n)", max_bytes=WORDS)
        return found

    def _refusal(self, error: HeadwaterError, where: str) -> HeadwaterError:
        names = ", ".join(self.table.names)
        text, state = error.message, state_of(error)
        if isinstance(error, SourceError | NotSupported) and state not in _PLAIN_REFUSALS:
            return error
        is_named = state in _NO_SUCH_RELATION and not text.startswith(_OTHER_TABLE)
        has_subquery = state != "" and not text.startswith(_GRAMMAR) and _SUBQUERY.search(where)
        if is_named or has_subquery:
            return _one_row_only()
        if state == "42703" and not _NO_SUCH_COLUMN.fullmatch(text):  # a field of another type, which therefore exists
            return _one_row_only()
        bad = _BAD_CONSTANT.match(text)
        if bad and bad[1] not in self._declared():
            return _one_row_only()
        if state == "42P17" or "IMMUTABLE" in text:
            return _not_immutable()
        if state == "42803" or state == "42P20" or state == "0A000":
            return NotSupported(f"a predicate reads one row: {text}", hint="Use only columns of this table.")
        if state == "42703":
            return InvalidRequest(f"the predicate: {text}", hint=f"The columns are {names}; text takes 'quotes'.")
        if isinstance(error, Forbidden):
            return NotSupported(
                f"PostgreSQL does not let Headwater analyse predicates: {text}",
                hint="GRANT TEMPORARY ON DATABASE … TO the server's role.",
            )
        if not state:
            return error
        return InvalidRequest(
            f"the predicate is not one SQL expression over a row: {text}",
            hint=f"Write it as after WHERE, such as total > 100 AND state = 'open'. The columns are {names}.",
        )

    # --- rows --------------------------------------------------------------------------------------------

    def holds(self, found: NormalPredicate, rows: Sequence[Row]) -> list[bool]:
        """Return whether the predicate is true for each of `rows`, which have all its columns."""
        pick = self._picker(found.columns)
        answers: list[bool] = []
        for start in range(0, len(rows), BATCH):
            cells = [pick(row) for row in rows[start : start + BATCH]]
            answers += self._batch(found, cells)
        return answers

    def _batch(self, found: NormalPredicate, rows: Sequence[tuple[str | None, ...]]) -> list[bool]:
        names = [f"c{place}" for place in range(len(found.columns))]
        params = [array_text([row[place] for row in rows]) for place in range(len(names))]
        arrays = ", ".join(f"${place + 1}::text[]" for place in range(len(names)))
        source = f"unnest({arrays}) WITH ORDINALITY AS r({', '.join([*names, 'n'])})"
        if not names:
            source, params = "generate_series(1, $1::bigint) AS r(n)", [str(len(rows)).encode()]
        cells = "".join(f", {self._cell(name, column)}" for name, column in zip(names, found.columns, strict=True))
        inner = f"SELECT r.n AS {_PLACE}{cells} FROM {source} OFFSET 0"
        sql = f"SELECT {_PLACE} FROM ({inner}) AS {self._name} WHERE {found.text}"
        answers = [False] * len(rows)
        try:
            answer = self._pool.read(lambda link: link.run(sql, params, max_bytes=WORDS), self._seconds)
            for (place,) in answer.values():
                answers[place - 1] = True  # PostgreSQL counts from one
        except HeadwaterError as error:
            raise _failure(error) from None
        return answers

    def _cell(self, name: str, column: str) -> str:
        shape = self.table.columns[self.table.index[column]]
        text, oid = self._types[shape.declared]
        collate = self._collation(shape.collation, oid)
        return f"(r.{name}::{text}{collate}) AS {ident(column)}"

    def _picker(self, columns: Sequence[str]) -> Callable[[Row], tuple[str | None, ...]]:
        """Return a function that takes the cells of `columns` out of a row, as PostgreSQL's text."""
        places = [self.table.index[name] for name in columns]
        if not places:
            return lambda row: ()
        pick: Callable[[Row], Any] = itemgetter(*places) if len(places) > 1 else lambda row: (row[places[0]],)
        return lambda row: tuple([to_text(value) for value in pick(row)])


_BYTES = dict.fromkeys(("BINARY", "RTRIM", "", "C", "POSIX"), '"C"')
_PLAIN_REFUSALS = frozenset({"0A000", "42P17"})


def _failure(error: HeadwaterError) -> HeadwaterError:
    state = state_of(error)
    if state == CANCELED:
        return InvalidRequest(f"the predicate takes too long for {BATCH} rows", hint="Use a simpler predicate.")
    if state[:2] in ("22", "54"):
        return InvalidRequest(
            f"the predicate fails on a row: {error.message}",
            hint="Make it work for every possible row, such as b <> 0 AND a / nullif(b, 0) > 1.",
        )
    if isinstance(error, Busy | InvalidRequest):
        return error
    return error if state else fault("08006", error.message)
