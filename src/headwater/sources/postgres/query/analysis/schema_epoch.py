"""Dependencies of an answer besides rows: definitions, session settings, versions. Read in one transaction.

Definitions are identified by their catalogue rows, never by their text: a definition that was changed and changed
back counts as another.
"""

from __future__ import annotations

import hashlib

import msgspec

from headwater.sources.postgres.protocol_session import Link
from headwater.sources.postgres.query.analysis.parse_tree_source import StatementFacts, oids
from headwater.sources.postgres.query.analysis.uncacheable_objects import read_relations
from headwater.sources.postgres.schema.catalog import number_of, schema_sql

# Settings that our transactions do not set themselves.
_SETTINGS = (
    *("server_version", "search_path", "lc_numeric", "lc_time", "timezone_abbreviations", "array_nulls"),
    *("standard_conforming_strings", "backslash_quote", "transform_null_equals", "row_security", "xmlbinary"),
    *("xmloption", "default_text_search_config", "session_replication_role"),
)
_SESSION = "SELECT concat_ws('/', current_user, " + ", ".join(f"current_setting('{name}')" for name in _SETTINGS) + ")"
_COLLATIONS = """
SELECT string_agg(oid || ' ' || coalesce(pg_collation_actual_version(oid), ''), ',' ORDER BY oid)
FROM pg_collation WHERE oid = ANY ($1::oid[])
"""
_OF_DATABASE = """
SELECT datcollate || ' ' || datctype || ' ' || coalesce(pg_database_collation_actual_version(oid), '')
FROM pg_database WHERE datname = current_database()
"""  # the function exists since PostgreSQL 15
_BEFORE_15 = "SELECT datcollate || ' ' || datctype FROM pg_database WHERE datname = current_database()"


def number_in(link: Link) -> int:
    """Return the schema number (see `SourceHead`) in the snapshot of the transaction."""
    ((text,),) = link.again(schema_sql(link.version)).texts()
    return number_of(str(text))


class State(msgspec.Struct, frozen=True):
    """The state of a transaction: schema number, session settings, and snapshot."""

    number: int
    session: str
    snapshot: str


def state_in(link: Link) -> State:
    """Return the state of the transaction, by one statement."""
    sql = f"SELECT ({schema_sql(link.version)}), ({_SESSION}), pg_current_snapshot()::text, pg_is_in_recovery()"
    ((text, session, snapshot, is_standby),) = link.again(sql).texts()
    link.refuse_standby(is_standby)
    return State(number_of(str(text)), str(session), str(snapshot))


def epoch_of(link: Link, facts: StatementFacts) -> str:
    """Return a digest of the definitions that a statement uses; it changes if the statement may mean otherwise."""
    listed = ",".join(str(each.oid) for each in read_relations(facts)) or "0"
    # Of tables only the statement's own; all types, which are few, because any type may be inside another.
    relations = f"(oid IN ({listed}) OR relkind = 'c' AND oid >= 16384)"
    default = _OF_DATABASE if link.version >= 150000 else _BEFORE_15
    found = [
        *facts.trees,
        *link.run(schema_sql(link.version, relations)).texts(),
        *link.run(_COLLATIONS, [oids(facts.used.collations)]).texts(),
        *link.run(default).texts(),
    ]
    return hashlib.blake2b(repr(found).encode(), digest_size=12).hexdigest()
