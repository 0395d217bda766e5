"""Statements of callers: the allowed ones, by first words and by PostgreSQL's plan, and how a statement is run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from headwater.errors import HeadwaterError, InvalidRequest
from headwater.model.literal import Value
from headwater.model.work.answer_limits import MAX_ROWS
from headwater.sources.postgres.errors import state_of
from headwater.sources.postgres.protocol_session import WORDS, Link
from headwater.sources.postgres.schema.table_shapes import OURS
from headwater.sources.postgres.types import TEXT
from headwater.sources.postgres.values import Bound, array_text, own_type, to_bound
from headwater.sources.query import Args
from headwater.sources.write import Result

MAX_TEXT = 100_000  # characters of a query, and of a statement by others than owners
_BLANK = re.compile(r"\s+|--[^\n\r]*|\(", re.ASCII)
_WORD = re.compile(r"[A-Za-z_]+", re.ASCII)
_SEVERAL = "Use tx.begin and tx.commit for transactions; no statement may change the session for the next one."
_REFUSED = {
    **dict.fromkeys(("begin", "start", "commit", "end", "abort", "rollback", "savepoint", "release"), "transactions"),
    **dict.fromkeys(("prepare", "execute", "deallocate", "declare", "fetch", "move", "close"), "the session"),
    **dict.fromkeys(("set", "reset", "discard", "load", "listen", "unlisten", "notify"), "the session"),
    "copy": "the connection",
    "lock": "the tables of others",
    "checkpoint": "the server",
}
_DML_TAGS = frozenset({"INSERT", "INSERT 0", "UPDATE", "DELETE", "MERGE"})
_READS = frozenset({"select", "values", "table", "with"})
_SCHEMA = frozenset(
    {"create", "alter", "drop", "comment", "security", "grant", "revoke", "reassign", "import", "refresh"}
)
_CONTROLS = {"publication", "subscription", "event", "system", "role", "user", "group", "database", "tablespace"}
# Functions with lasting effects that a SELECT may call.
_WRITERS = re.compile(
    r"\b(nextval|setval|lo_\w+|pg_advisory\w*|pg_try_advisory\w*|pg_notify|set_config|pg_logical_\w+|pg_replication_\w+"
    r"|pg_create_\w+|pg_drop_\w+|pg_current_xact_id|txid_current|dblink\w*|pg_terminate\w*|pg_cancel\w*)\s*\(",
    re.IGNORECASE,
)
_SLOTS = re.compile(
    r"\b(pg_drop_replication_slot|pg_replication_slot_advance|pg_logical_slot_\w+|pg_sync_replication_slots"
    r"|pg_copy_logical_replication_slot)\s*\(",
    re.IGNORECASE,
)
FLOAT_ARRAYS = {1021: "real[]", 1022: "double precision[]"}
# Callers' texts: an unclosed quote or comment reaches to the end, so that no text takes more than linear time.
_QUOTED = re.compile(r"'[^']*(?:''[^']*)*'|\"[^\"]*(?:\"\"[^\"]*)*\"|--[^\n\r]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_UNDETERMINED = frozenset({"42P18", "42725"})  # the type of a parameter is unknown, or an operator is ambiguous
_MISREAD = frozenset({"42601", "42883"})  # no such syntax, or operator
_VOLATILE = """
SELECT 1 FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
WHERE p.provolatile = 'v' AND n.nspname <> 'pg_catalog' AND p.proname = ANY($1::text[]) LIMIT 1
"""
_CALLED = re.compile(r"(?<![\w$])([\w$]++)\s*+\(")
_CALLED_QUOTED = re.compile(r'"([^"]*+(?:""[^"]*+)*+)"(\s*+\()?')


_NAMED = re.compile(
    r"""'[^']*(?:''[^']*)*'|"[^"]*(?:""[^"]*)*"|--[^\n\r]*|/\*.*?(?:\*/|\Z)|(?<![\w$])\$(?P<tag>[A-Za-z_]*)\$.*?(?:\$(?P=tag)\$|\Z)|::|:(?P<name>[A-Za-z_]\w*)""",
    re.DOTALL,
)
_COMMENT_MARK = re.compile(r"/\*|\*/")


class Statement(msgspec.Struct, frozen=True):
    """A statement of a caller, as PostgreSQL parsed it."""

    sql: str  # with $1, $2 … for its parameters
    first: str  # its first word
    read_only: bool
    schema: bool
    types: tuple[int, ...]  # of its parameters


def first_word(sql: str) -> str:
    """Return the first word of a statement, after comments and brackets, in lower case."""
    at = 0
    while at < len(sql):
        if sql.startswith("/*", at):
            at = comment_end(sql, at)
        elif found := _BLANK.match(sql, at):
            at = found.end()
        else:
            break
    word = _WORD.match(sql, at)
    return word[0].lower() if word else ""


def comment_end(sql: str, at: int) -> int:
    """Return the end of the comment that begins at `at`; comments nest."""
    depth = 0
    for mark in _COMMENT_MARK.finditer(sql, at):
        depth += 1 if mark[0] == "/*" else -1
        if not depth:
            return mark.end()
    return len(sql)


def check_length(sql: str) -> None:
    """Raise InvalidRequest for a text that is too long to be analysed."""
    if len(sql) > MAX_TEXT:
        raise InvalidRequest(f"a statement has at most {MAX_TEXT} characters", hint="Bind long values as arguments.")


def check_allowed(sql: str) -> str:
    """Return the first word; raise InvalidRequest for a statement with effects beyond its own transaction."""
    first = first_word(sql)
    if not first:
        raise InvalidRequest("there is no statement in the text", hint="Send a statement such as SELECT 1.")
    if first in _REFUSED:
        raise InvalidRequest(f"{first.upper()} is not supported: it is about {_REFUSED[first]}", hint=_SEVERAL)
    words = _QUOTED.sub(" ", sql).lower().split(maxsplit=2)
    if first in ("create", "alter", "drop") and len(words) > 1 and words[1] in _CONTROLS:
        raise InvalidRequest(f"{' '.join(words[:2]).upper()} is not supported", hint="Run it in PostgreSQL itself.")
    if found := _SLOTS.search(sql):
        raise InvalidRequest(f"{found[1]} is not supported: it may break capture", hint="Run it in PostgreSQL.")
    return first


def examine(link: Link, sql: str, args: Args | None) -> tuple[Statement, list[Bound]]:
    """Let PostgreSQL parse `sql`; return the statement and its bound arguments: none if `args` is None."""
    first = check_allowed(sql)
    if args is None:
        with places_named(sql):
            wanted = link.prepare(sql)
        return Statement(sql, first, _reads(link, first, sql, wanted), first in _SCHEMA, wanted), []
    sql, values = placed(sql, args)
    with places_named(sql):
        wanted = _types(link, sql, values)
    if len(wanted) != len(values):
        raise InvalidRequest(
            f"the statement has {len(wanted)} parameters, {len(values)} arguments given",
            hint="Parameters are written $1, $2 … and counted once each.",
        )
    bound = [to_bound(value, FLOAT_ARRAYS.get(oid, "")) for value, oid in zip(values, wanted, strict=True)]
    return Statement(sql, first, _reads(link, first, sql, wanted), first in _SCHEMA, wanted), bound


@contextmanager
def places_named(sql: str) -> Iterator[None]:
    """Add the parameter syntax to the hint of an error about `?`, which is an operator of PostgreSQL."""
    try:
        yield
    except InvalidRequest as error:
        if state_of(error) in _MISREAD and "?" in _QUOTED.sub(" ", sql):
            error.hint = "Parameters are written $1, $2 …; a ? is an operator of PostgreSQL."
        raise


def placed(sql: str, args: Args) -> tuple[str, list[Value]]:
    """Return the statement with `$1`, `$2` … as its parameters, and their values in that order.

    A named parameter is written `:name`, or `$1` with an argument called `1` or `$1`.
    """
    if not isinstance(args, dict):
        return sql, list(args)
    if all(name.removeprefix("$").isdecimal() for name in args):
        return sql, _in_order({name.removeprefix("$"): value for name, value in args.items()})
    places: dict[str, int] = {}

    def place(found: re.Match[str]) -> str:
        name = found["name"]
        if name is None:
            return found[0]
        if name not in args:
            raise InvalidRequest(f"there is no argument {name!r}", hint="Give a value for every :name.")
        return f"${places.setdefault(name, len(places) + 1)}"

    text = _NAMED.sub(place, sql)
    return text, [args[name] for name in places]


def typed(link: Link, sql: str, args: Args) -> tuple[str, tuple[int, ...]]:
    """Return the statement with its parameters written `$1`, `$2` …, and the types of the parameters."""
    text, values = placed(sql, args)
    with places_named(text):
        return text, _types(link, text, values)


def _in_order(named: dict[str, Value]) -> list[Value]:
    places = [str(place + 1) for place in range(len(named))]
    for place in places:
        if place not in named:
            raise InvalidRequest(f"argument {place!r} is missing", hint="PostgreSQL's parameters are $1, $2 …")
    return [named[place] for place in places]


def _types(link: Link, sql: str, values: Sequence[Value]) -> tuple[int, ...]:
    """Return the type of each parameter: as the statement determines it, else the type of its value."""
    if not values:
        return link.prepare(sql)
    own = [own_type(value) for value in values]
    link.script("SAVEPOINT headwater_look")
    try:
        wanted = link.prepare(sql)
    except HeadwaterError as error:
        if state_of(error) not in _UNDETERMINED:
            raise
        link.script("ROLLBACK TO headwater_look")
        wanted = link.prepare(sql, own)
    link.script("RELEASE headwater_look")
    # PostgreSQL makes an undetermined parameter text.
    return tuple([mine if oid == TEXT else oid for oid, mine in zip(wanted, own, strict=False)] + [*wanted[len(own) :]])


def _reads(link: Link, first: str, sql: str, types: Sequence[int]) -> bool:
    if first == "show":
        return True
    if first == "explain":
        return not re.search(r"\banaly[sz]e\b", sql, re.IGNORECASE)
    bare = _QUOTED.sub(" ", sql)
    if first not in _READS or _WRITERS.search(bare) or re.search(r"\binto\b", bare, re.IGNORECASE):
        return False
    plan = link.run(f"EXPLAIN {sql}", [None] * len(types), types, max_bytes=WORDS).texts()
    text = "\n".join(str(line) for (line,) in plan)
    if _WRITING_PLAN.search(text):
        return False
    names = {found[1] for found in _CALLED.finditer(sql)}
    names |= {found[1].replace('""', '"') for found in _CALLED_QUOTED.finditer(sql) if found[2]}
    folded = sorted(names | {name.lower() for name in names})
    return not (folded and link.run(_VOLATILE, [array_text(folded)]).rows)


def run_statement(link: Link, statement: Statement, bound: Sequence[Bound]) -> Result:
    """Run a statement and return its result; undo it if it is read-only and has too many rows."""
    if statement.read_only:
        link.script("SAVEPOINT headwater_read")
    answer = link.run(statement.sql, bound, statement.types, max_rows=MAX_ROWS, to_end=not statement.read_only)
    if statement.read_only:
        undo = "ROLLBACK TO headwater_read; " if answer.truncated else ""
        link.script(f"{undo}RELEASE headwater_read")
    return Result(
        columns=answer.columns,
        rows=answer.answer_rows(),
        affected=answer.affected if answer.tag in _DML_TAGS else 0,
        truncated=answer.truncated,
    )


# Possessive, and within a line: the text of a plan contains constants of the caller.
_WRITING_PLAN = re.compile(r"^[ ]*+(?:->[ ]++)?+(Insert|Update|Delete|Merge|LockRows)\b", re.MULTILINE)
_LOCKED = f"""
SELECT n.nspname, c.relname FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation'
  AND (starts_with(c.relname, '{OURS}') OR starts_with(n.nspname, '{OURS}')) LIMIT 1
"""


def check_ours(link: Link) -> None:
    """Raise InvalidRequest if the transaction has locked one of our tables."""
    for schema, name in link.run(_LOCKED).texts():
        raise InvalidRequest(
            f"{schema}.{name} uses a name that begins with {OURS!r}, which is reserved for Headwater",
            hint="Choose another name; statements, views and triggers cannot use Headwater's tables.",
        )
