"""Report of the engine on a statement: the tables, columns and functions that SQLite requests while preparing it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Any, TypeVar

import apsw
import msgspec

from headwater.errors import HeadwaterError, InvalidRequest
from headwater.sources.sqlite.connection import ident, sqlite_errors
from headwater.sources.sqlite.database_file import GuardedConnection
from headwater.sources.sqlite.query.authorizer import ANY_BINDINGS, Access, Statement
from headwater.sources.sqlite.query.determinism.deterministic_functions import DETERMINISTIC, HARMLESS
from headwater.sources.sqlite.query.statement_growth import MAX_NODES, TOO_LARGE, too_large
from headwater.sources.sqlite.query.syntax.lexer import NotAnalysed, folded, named
from headwater.sources.sqlite.query.syntax.name_resolution import FUNCTIONS_OF_ROWS

MAX_PARAMETERS = 999
UNKNOWN_VIRTUAL_TABLE = "a virtual table ()"  # no table can have this name
# Selects the objects of a schema that have the name of a function of rows: a virtual table replaces the function.
_SHADOWS = "lower(name) IN ({})".format(", ".join(f"'{name}'" for name in sorted(FUNCTIONS_OF_ROWS)))
Step = tuple[Any, ...]
Program = list[Step]
T = TypeVar("T")


class StatementFacts(msgspec.Struct, frozen=True):
    """Facts about a statement that are known without parsing its text. Names are spelled as in the schema."""

    statement: Statement
    columns: frozenset[tuple[str, str]]  # columns of base tables; "" is any column, as count(*) requests
    tables: tuple[str, ...]  # base tables, sorted
    views: tuple[str, ...]
    functions: frozenset[str]
    is_recursive: bool
    foreign: tuple[str, ...]  # other objects read that may change: virtual tables, the schema itself
    program: Program  # the opcodes that SQLite would run
    columnless: frozenset[str]  # tables and views reported without a column and not opened: perhaps names of WITH

    @property
    def objects(self) -> tuple[str, ...]:
        """Return the tables and views whose definitions the statement depends on."""
        return tuple(sorted({*self.tables, *self.views}))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the parameter names by position; an unnamed parameter has its number as name."""
        return tuple(name or str(place) for place, name in enumerate(self.statement.parameters, 1))


def facts_of(reader: GuardedConnection, sql: str) -> StatementFacts:
    """Return the engine's facts about `sql`; InvalidRequest unless it is one read-only statement."""
    if "\0" in sql or any("\ud800" <= char <= "\udfff" for char in sql):
        raise InvalidRequest(
            "the statement contains a NUL character or an incomplete character", hint="Send it as UTF-8 text."
        )
    reader.catalog.refresh_unless_held()
    statement, accesses = reader.guard.accesses(sql)
    if not statement.read_only:
        raise InvalidRequest("a query only reads; this statement writes", hint="Use sql.exec or data.* to write.")
    if not statement.columns:
        raise InvalidRequest("the statement returns no columns", hint="Send a SELECT.")
    if len(statement.parameters) > MAX_PARAMETERS:
        raise InvalidRequest(f"more than {MAX_PARAMETERS} parameters", hint="Number them from ?1, or bind a JSON list.")
    try:
        program = program_of(reader, sql.lstrip("; \t\r\n"))
    except InvalidRequest as error:
        if error.message == TOO_LARGE:
            raise
        raise InvalidRequest(f"only a SELECT can be a query ({error.message})", hint="Send one SELECT.") from None
    return _facts(reader, sql, statement, accesses, program)


def _facts(
    reader: GuardedConnection, sql: str, statement: Statement, accesses: list[Access], program: Program
) -> StatementFacts:
    known = {folded(name): name for name in reader.catalog.tables()}
    definitions = reader.guard.views()
    views = {folded(name): name for name in definitions}
    others = {folded(name) for name in _other_names(reader)}
    columns, tables, seen, foreign = set(), set(), set(), set()
    certain = set()  # names that are a table or view beyond doubt
    for access in accesses:
        if access.op != apsw.SQLITE_READ or access.a is None:
            continue
        name = folded(access.a)
        if access.b:
            certain.add(name)
        if name in known:
            tables.add(known[name])
            columns.add((known[name], access.b or ""))
        elif name in views:
            seen.add(views[name])
        elif access.b or name in others or name.startswith(("pragma_", "sqlite_")):
            foreign.add(access.a)
        # Any other name is a WITH name of which no column is read: SQLite calls the authorizer for it as for a table.
    seen |= {views[folded(access.by)] for access in accesses if access.by and folded(access.by) in views}
    functions = {(access.b or "").lower() for access in accesses if access.op == apsw.SQLITE_FUNCTION}
    for name in _opened(reader, program):
        certain.add(folded(name))
        if folded(name) in known:
            tables.add(known[folded(name)])
        else:
            foreign.add(name)
    foreign |= _virtual_tables(reader, program, [sql, *definitions.values()], foreign)
    shadowed = {folded(str(name)) for (name,) in reader.guard.run(f"SELECT name FROM sqlite_schema WHERE {_SHADOWS}")}
    harmless = FUNCTIONS_OF_ROWS.keys() - shadowed
    return StatementFacts(
        statement,
        frozenset(columns),
        tuple(sorted(tables)),
        tuple(sorted(seen)),
        frozenset(functions),
        any(access.op == apsw.SQLITE_RECURSIVE for access in accesses),
        tuple(sorted(name for name in foreign if folded(name) not in harmless)),
        program,
        frozenset(name for name in (*tables, *seen) if folded(name) not in certain),
    )


def program_of(reader: GuardedConnection, sql: str) -> Program:
    """Return the opcodes that SQLite would run for `sql`, without comments and naming steps."""
    return _read_program(reader, sql, list)


def is_program_of(reader: GuardedConnection, sql: str, program: Program) -> bool:
    """Return whether SQLite would run `program` for `sql`, without storing a second program."""
    return _read_program(
        reader, sql, lambda steps: all(step == other for step, other in zip_longest(program, steps, fillvalue=()))
    )


def _read_program(reader: GuardedConnection, sql: str, read: Callable[[Iterator[Step]], T]) -> T:
    with reader.guard.own() as db, sqlite_errors(), reader.guard.preparing() as prepared:
        cursor = db.cursor()

        def trace(*_: object) -> bool:
            prepared()  # the program shows the statement's own values, which may be long
            return True

        cursor.exec_trace = trace
        try:
            return read(_steps(cursor.execute(f"EXPLAIN {sql}", ANY_BINDINGS, can_cache=False)))
        finally:
            cursor.close(True)


def _steps(rows: Iterable[Step]) -> Iterator[Step]:
    for count, row in enumerate(rows):
        if count >= MAX_NODES:
            raise too_large()
        yield (row[1], *row[2:5], None if row[1] == "Explain" else row[5], row[6])


def _opened(reader: GuardedConnection, program: Program) -> set[str]:
    """Return the tables whose rows or indexes the program opens: the authorizer misses columns named only in USING."""
    roots = {step[2] for step in program if step[0] in ("OpenRead", "ReopenIdx") and step[3] == 0}
    # Without json_each(), whose name a table of the user may have.
    pages = ", ".join(str(int(root)) for root in sorted(roots))
    found = reader.guard.run(f"SELECT tbl_name FROM sqlite_schema WHERE rootpage IN ({pages})")
    return {str(name) for (name,) in found.fetchall()} | ({"sqlite_schema"} if 1 in roots else set())


def _other_names(reader: GuardedConnection) -> set[str]:
    """Return every name that FROM may contain and that is neither a table of the user nor a view."""
    found = reader.guard.run(
        "SELECT name FROM sqlite_schema WHERE type = 'table' UNION SELECT name FROM temp.pragma_module_list"
    )
    return {str(name) for (name,) in found.fetchall()}


def _virtual_tables(
    reader: GuardedConnection, program: Program, texts: Iterable[str], known: Iterable[str]
) -> set[str]:
    """Return the virtual tables that the program opens: the authorizer misses columns of USING and NATURAL.

    The program names a virtual table by its address, which is identical in every program of this connection.
    """
    opened = {step[4] for step in program if step[0] == "VOpen"}
    if not opened:
        return set()
    found, left = set(), set(opened)
    for name in sorted({**_candidates(reader, texts), **{folded(name): name for name in known}}.values()):
        addresses = _addresses(reader, name) & opened
        if addresses:
            found.add(name)
            left -= addresses
    return found | {UNKNOWN_VIRTUAL_TABLE} if left else found


def _candidates(reader: GuardedConnection, texts: Iterable[str]) -> dict[str, str]:
    """Return every name in the texts that may be a virtual table: folded name to the schema's spelling."""
    names: set[str] = set()
    for text in texts:
        try:
            names |= named(text)
        except NotAnalysed:  # a table not found here is reported as UNKNOWN_VIRTUAL_TABLE
            continue
    virtual = {name: name for name in names if name.startswith("pragma_")}
    virtual |= {folded(name): name for name in _other_names(reader)}
    return {name: virtual[name] for name in names if name in virtual}


def _addresses(reader: GuardedConnection, name: str) -> set[Any]:
    try:
        steps = program_of(reader, f"SELECT 1 FROM {ident(name)}")
    except HeadwaterError:  # no table has this name, or the table requires arguments
        return set()
    return {step[4] for step in steps if step[0] == "VOpen"}


def volatility(reader: GuardedConnection, facts: StatementFacts) -> tuple[str, ...]:
    """Return reasons why answers are not cacheable: they may change without a captured change."""
    reasons = [f"{name}() may answer differently each time" for name in facts.functions if name not in DETERMINISTIC]
    return tuple(sorted([*reasons, *unseen(reader, facts)]))


def unseen(reader: GuardedConnection, facts: StatementFacts) -> tuple[str, ...]:
    """Return reasons why answers are not cacheable: the statement reads objects that are not captured."""
    captured = {layout.table.name for layout in reader.catalog.layouts.values() if layout.active}
    reasons = [f"table {name!r} is not captured" for name in facts.tables if name not in captured]
    reasons += [f"{name!r} is no table whose changes are seen" for name in facts.foreign]
    return tuple(sorted(reasons))


def beyond(reader: GuardedConnection, facts: StatementFacts) -> tuple[str, ...]:
    """Return the stored objects read besides the user's tables: virtual tables, the schema, views without a table."""
    found = {*facts.foreign, *(view for view in facts.views if not _reads_table(reader, view))}
    found |= {f"{name}()" for name in facts.functions if name not in HARMLESS}
    return tuple(sorted(found))


def _reads_table(reader: GuardedConnection, view: str) -> bool:
    """Return whether a view reads any table: otherwise no scope on tables covers its contents."""
    try:
        return bool(facts_of(reader, f"SELECT * FROM main.{ident(view)}").tables)
    except HeadwaterError:
        return False


def uncaptured_rowids(reader: GuardedConnection, facts: StatementFacts) -> tuple[str, ...]:
    """Return reasons why answers are not cacheable: rowids that are read, but neither keys nor in captured changes."""
    tables = reader.catalog.tables()
    asked = {table for table, column in facts.columns if column == "ROWID" and column not in tables[table].index}
    found = {name for name in asked if not any(c.auto or c.hidden for c in tables[name].columns)}
    return tuple(f"the rowid of {name!r} is not captured" for name in sorted(found))


def epoch_of(reader: GuardedConnection, objects: tuple[str, ...]) -> str:
    """Return a digest of the definitions of `objects`; it differs where a query may mean something else."""
    kinds = "type IN ('table', 'view')"
    names = f"name IN ({', '.join('?' * len(objects))}) OR {_SHADOWS}"
    found = reader.guard.run(
        f"SELECT type, name, sql FROM sqlite_schema WHERE {kinds} AND ({names}) ORDER BY name", objects
    ).fetchall()
    tables = reader.catalog.tables()
    shapes = [msgspec.structs.replace(tables[name], version=0) for name in objects if name in tables]
    digest = hashlib.blake2b(msgspec.json.encode([found, shapes]), digest_size=12)
    if any(column.hidden for table in shapes for column in table.columns):
        # VACUUM may renumber the rows of such a table, and only the schema version shows that.
        digest.update(str(schema_version(reader)).encode())
    return digest.hexdigest()


def schema_version(reader: GuardedConnection) -> int:
    """Return the schema version, which changes with every schema change by any connection."""
    ((version,),) = reader.guard.run("PRAGMA schema_version").fetchall()
    return int(str(version))
