"""The engine's word on a statement: which tables, columns and functions it asks for while it prepares it."""

from __future__ import annotations

import hashlib

import apsw
import msgspec

from headwater.errors import InvalidRequest
from headwater.sources.sqlite.analysis.functions import is_deterministic
from headwater.sources.sqlite.guard import Access, Statement
from headwater.sources.sqlite.opening import Connected

MAX_PARAMETERS = 999


class Facts(msgspec.Struct, frozen=True):
    """What is known of a statement without reading its text. Names are as the schema writes them."""

    statement: Statement
    columns: frozenset[tuple[str, str]]  # of base tables; "" is any column, as count(*) asks for
    tables: tuple[str, ...]  # base tables, sorted
    views: tuple[str, ...]
    functions: frozenset[str]
    is_recursive: bool
    foreign: tuple[str, ...]  # other things that are read: virtual tables, the schema itself, table-valued functions

    @property
    def objects(self) -> tuple[str, ...]:
        """Everything named whose definition matters."""
        return tuple(sorted({*self.tables, *self.views}))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Their names by place; a bare one is called by its number."""
        return tuple(name or str(place) for place, name in enumerate(self.statement.parameters, 1))


def facts_of(reader: Connected, sql: str) -> Facts:
    """Ask the engine; InvalidRequest for what is no single read-only statement."""
    reader.catalog.look()
    statement, accesses = reader.guard.accesses(sql)
    if not statement.read_only:
        raise InvalidRequest("a query only reads; this statement writes", hint="Use sql.exec or data.* to write.")
    if not statement.columns:
        raise InvalidRequest("the statement has no answer", hint="Send a SELECT.")
    if len(statement.parameters) > MAX_PARAMETERS:
        raise InvalidRequest(f"more than {MAX_PARAMETERS} parameters", hint="Number them from ?1, or bind a JSON list.")
    return _facts(reader, statement, accesses)


def _facts(reader: Connected, statement: Statement, accesses: list[Access]) -> Facts:
    known = {name.lower(): name for name in reader.catalog.tables()}
    views = {name.lower(): name for name in _views(reader)}
    columns, tables, seen, foreign = set(), set(), set(), set()
    for access in accesses:
        if access.op != apsw.SQLITE_READ or access.a is None:
            continue
        name = access.a.lower()
        if name in known:
            tables.add(known[name])
            columns.add((known[name], access.b or ""))
        elif name in views:
            seen.add(views[name])
        else:
            foreign.add(access.a)
    seen |= {views[access.by.lower()] for access in accesses if access.by and access.by.lower() in views}
    functions = {(access.b or "").lower() for access in accesses if access.op == apsw.SQLITE_FUNCTION}
    return Facts(
        statement,
        frozenset(columns),
        tuple(sorted(tables)),
        tuple(sorted(seen)),
        frozenset(functions),
        any(access.op == apsw.SQLITE_RECURSIVE for access in accesses),
        tuple(sorted(foreign)),
    )


def _views(reader: Connected) -> list[str]:
    found = reader.guard.run("SELECT name FROM sqlite_schema WHERE type = 'view'")
    return [str(name) for (name,) in found.fetchall()]


def volatility(reader: Connected, facts: Facts) -> tuple[str, ...]:
    """Why an answer may change without a change we see."""
    captured = {layout.table.name for layout in reader.catalog.layouts.values() if layout.active}
    reasons = [f"{name}() may answer differently each time" for name in facts.functions if not is_deterministic(name)]
    reasons += [f"table {name!r} is not captured" for name in facts.tables if name not in captured]
    reasons += [f"{name!r} is no table whose changes are seen" for name in facts.foreign]
    return tuple(sorted(reasons))


def epoch_of(reader: Connected, objects: tuple[str, ...]) -> str:
    """The definitions of `objects` as one short text: another one where an answer may mean something else."""
    kinds = "type IN ('table', 'view')"
    found = reader.guard.run(
        f"SELECT type, name, sql FROM sqlite_schema WHERE {kinds} AND name IN (SELECT value FROM json_each(?))"
        " ORDER BY name",
        (msgspec.json.encode(objects).decode(),),
    ).fetchall()
    tables = reader.catalog.tables()
    shapes = [msgspec.structs.replace(tables[name], version=0) for name in objects if name in tables]
    digest = hashlib.blake2b(msgspec.json.encode([found, shapes]), digest_size=12)
    if any(column.hidden for table in shapes for column in table.columns):
        # VACUUM may number the rows of such a table anew, and says so by the schema's version alone.
        digest.update(str(schema_version(reader)).encode())
    return digest.hexdigest()


def schema_version(reader: Connected) -> int:
    """Moves with every change of the schema, of any hand."""
    ((version,),) = reader.guard.run("PRAGMA schema_version").fetchall()
    return int(str(version))
