"""Find volatile functions in a caller's statement, by PostgreSQL's parse tree, and check the role that calls them.

A volatile function may read files, signal other sessions or execute SQL in a string; its catalogue entry does not say.
Functions inside views and other functions are not checked: the owner of the database wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from headwater.errors import Forbidden, HeadwaterError
from headwater.model.principal import EDITOR, OWNER
from headwater.sources.postgres.protocol_session import Link
from headwater.sources.postgres.query.analysis.immutable_functions import FIRST_OWN, SETS_WEAK_MODE, TRUSTED
from headwater.sources.postgres.query.analysis.parse_tree import Item, UnsupportedTree, below
from headwater.sources.postgres.query.analysis.parse_tree_source import Body, body_of, oids
from headwater.sources.postgres.query.analysis.tree_reads import FUNCTION_FIELDS, OPERATOR_FIELDS, Reader, UsedObjects
from headwater.sources.postgres.values import array_text

NOT_UNDERSTOOD = "functions that cannot be checked"
_VOLATILE = f"""
SELECT DISTINCT CASE WHEN n.nspname = 'pg_catalog' OR x.extname IS NOT NULL THEN p.proname::text
       ELSE n.nspname || '.' || p.proname END
FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
LEFT JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
LEFT JOIN pg_extension x ON x.oid = d.refobjid AND NOT x.extname = ANY ($3::text[])
WHERE (p.provolatile = 'v' OR p.provolatile = 's' AND x.extname IS NOT NULL OR {SETS_WEAK_MODE})
  AND (p.oid = ANY ($1::oid[]) OR p.oid IN (SELECT oprcode FROM pg_operator WHERE oid = ANY ($2::oid[])))
ORDER BY 1
"""
_MUTABLE = f"""
SELECT 1 FROM pg_proc p WHERE (p.provolatile <> 'i' OR {SETS_WEAK_MODE}) AND (p.oid = ANY ($1::oid[])
  OR p.oid IN (SELECT oprcode FROM pg_operator WHERE oid = ANY ($2::oid[]))
  OR p.oid IN (SELECT unnest(ARRAY[typinput, typoutput]) FROM pg_type WHERE oid = ANY ($3::oid[]))) LIMIT 1
"""
_RULES = "SELECT ev_action::text FROM pg_rewrite WHERE ev_class = ANY ($1::oid[])"
_RELATION = re.compile(r":relid (\d+)")
# Built-in volatile functions without access to the server's files, settings, other sessions or dynamic SQL.
_FOR_EDITORS = frozenset(
    (
        # Without setseed() and lastval(): sessions are shared, and the next caller of a session would be affected.
        *("nextval", "currval", "random", "random_normal", "gen_random_uuid", "uuidv4", "uuidv7"),
        *("clock_timestamp", "timeofday", "pg_sleep", "pg_sleep_for", "pg_sleep_until", "pg_notify"),
        *("pg_advisory_xact_lock", "pg_advisory_xact_lock_shared"),
        *("pg_try_advisory_xact_lock", "pg_try_advisory_xact_lock_shared"),
    )
)
# Callers share a login, and PostgreSQL lets a login signal all of its own sessions.
FOR_NOBODY = frozenset(
    (
        *("pg_terminate_backend", "pg_cancel_backend", "pg_log_backend_memory_contexts"),
        *("pg_reload_conf", "pg_rotate_logfile", "pg_promote", "pg_switch_wal"),
        *("pg_wal_replay_pause", "pg_wal_replay_resume"),
    )
)


def volatile_calls(link: Link, tree: Item) -> tuple[str, ...]:
    """Return the names of the volatile functions and operators in a tree, built-in ones without their schema.

    Stable functions of extensions count too: some of them run SQL in a string, such as crosstab().
    """
    functions, operators = set[int](), set[int]()
    for node in below(tree):
        functions.update(int(node.fields[name]) for name in FUNCTION_FIELDS if name in node.fields)
        operators.update(int(node.fields[name]) for name in OPERATOR_FIELDS if name in node.fields)
        if node.tag in ("ROWCOMPAREEXPR", "ROWCOMPARE"):
            operators.update(node.numbers("opnos"))
    params = [oids(functions), oids(operators), array_text(sorted(TRUSTED))]
    return tuple(str(name) for (name,) in link.run(_VOLATILE, params).values())


def has_mutable_calls(link: Link, tree: Item) -> bool:
    """Return whether an expression over a row calls functions that are not IMMUTABLE, or may do so."""
    used = UsedObjects()
    Reader(used).expression(tree)
    types = {oid for conversion in used.conversions for oid in conversion}
    found = link.run(_MUTABLE, [oids(used.functions), oids(used.operators), oids(types)]).rows
    return bool(found or used.reasons)


def check_targets(link: Link, tree: Item) -> None:
    """Raise Forbidden if the statement writes to a system catalogue, also by way of views and rules.

    `UPDATE pg_settings` is SET by another name, and a view of a superuser writes with the rights of the superuser.
    """
    targets = {
        node.items("rtable")[node.number("resultRelation") - 1].number("relid")
        for node in below(tree)
        if node.tag == "QUERY" and node.number("resultRelation")
    }
    seen: set[int] = set()
    while targets:
        if min(targets) < FIRST_OWN:
            raise Forbidden("system catalogues cannot be written through Headwater", hint="Use PostgreSQL directly.")
        seen |= targets
        rules = link.run(_RULES, [oids(targets)]).texts()
        targets = {int(oid) for (rule,) in rules for oid in _RELATION.findall(str(rule)) if int(oid)} - seen


def check_calls(link: Link, sql: str, types: Sequence[int], role: str) -> None:
    """Raise Forbidden if a SELECT or DML statement calls a function that `role` may not call.

    The check leaves a temporary function: the caller must roll the transaction back.
    """
    try:
        tree = body_of(link, sql, types).items
        calls = volatile_calls(link, tree)
    except (UnsupportedTree, Forbidden, RecursionError):
        if role == OWNER:
            return
        raise Forbidden(
            "the functions in this statement cannot be checked, so it needs the role owner",
            hint="Write the statement as one SELECT, INSERT, UPDATE or DELETE.",
            role=OWNER,
        ) from None
    if role != OWNER:
        check_targets(link, tree)
    refuse(calls, role)


def refuse(calls: Iterable[str], role: str) -> None:
    """Raise Forbidden for the first function that statements of callers in `role` may not call."""
    for name in calls:
        if name in FOR_NOBODY:
            raise Forbidden(f"{name}() cannot be called through Headwater", hint="Call it in PostgreSQL directly.")
        is_allowed = role == OWNER or (role == EDITOR and ("." in name or name in _FOR_EDITORS))
        if not is_allowed:
            needed = EDITOR if "." in name or name in _FOR_EDITORS else OWNER
            raise Forbidden(f"{name}() needs the role {needed}", hint=f"Ask an {needed} to run it.", role=needed)


def calls_of_failed(link: Link, body: Body | None) -> tuple[str, ...]:
    """Return the volatile functions of a statement that was parsed, but could not be analysed."""
    try:
        return (NOT_UNDERSTOOD,) if body is None else volatile_calls(link, body.items)
    except (UnsupportedTree, HeadwaterError, RecursionError):
        return (NOT_UNDERSTOOD,)
