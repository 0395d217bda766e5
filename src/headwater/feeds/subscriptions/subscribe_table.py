"""Validation of the parameters of `cdc.subscribe_table`."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from headwater.errors import InvalidRequest, NotFound, NotSupported
from headwater.feeds.filters.row_filter import Rule
from headwater.feeds.options import ATOMIC, ATOMIC_STRICT, OPS, Options, Shard
from headwater.model import kv_table
from headwater.model.clock import parse_ts, ts_of_ms
from headwater.model.database_name import real_name
from headwater.model.formats import CHANGE_FORMATS as FORMATS
from headwater.model.formats import ENVELOPES
from headwater.model.literal import I64_MAX
from headwater.model.principal import ADMIN, Principal
from headwater.model.suggestion import nearest
from headwater.model.table import Table
from headwater.sources.read import Readable, permitted_filter

LATEST, EARLIEST, SNAPSHOT, OFFSET, TS = "latest", "earliest", "snapshot", "offset", "ts"
OF_ONE_TABLE = ("pk", "pk_range", "spans", "columns", "where")
STARTS = 'Send "latest", "earliest", "snapshot", {"offset": n} or {"ts": "<ms>.<counter>"}.'
BOUNDS = ("lower_bound", "upper_bound")
MOST_SHARDS = 1024
LONGEST_NAME = 200
MOST_SPANS = 1000
MOST_TABLES = 1000
MOST_BYTES = 64 << 10  # of all options together, because every subscription keeps its own in memory


class SubscriptionParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The parameters that subscriptions to tables and to queries have in common."""

    ops: list[str] | None = None
    pk: list[Any] | None = None
    pk_range: dict[str, Any] | None = None
    spans: list[dict[str, Any]] | None = None
    shard: dict[str, Any] | None = None
    where: str | None = None
    columns: list[str] | None = None
    include: dict[str, Any] | None = None
    format: str | None = None
    start: str | dict[str, Any] | None = None
    name: str | None = None


class SubscribeTable(SubscriptionParams, forbid_unknown_fields=True, kw_only=True):
    """The parameters of cdc.subscribe_table."""

    db: str | None = None
    table: str | None = None
    tables: list[str] | None = None
    txn: str | None = None


def named_tables(params: SubscribeTable) -> list[str] | None:
    """Return the tables that `params` name; None for the whole database."""
    named = ([params.table] if params.table is not None else []) + (params.tables or [])
    return named or None


class Start(msgspec.Struct, frozen=True):
    """The start of a feed: a keyword, or just after `at`, which is an offset or a timestamp."""

    kind: str = LATEST
    at: int = 0


class Request(msgspec.Struct, frozen=True):
    """A validated subscription request. Lists that are sets are sorted, so that equal requests are equal."""

    options: Options
    start: Start
    name: str | None
    names_images: bool = False  # False: the images are the default, which depends on the start


def check(params: SubscribeTable, source: Readable, who: Principal = ADMIN) -> Request:
    """Check `params` against the current tables; raise InvalidRequest or NotFound with the invalid field."""
    start = checked_start(params.start)
    tables = _tables(who, params, source)
    form = _format(params.format)
    images = checked_images(params.include, form, start)
    options = checked_options(params, real_name(params.db), form, images, source, who, *tables.values())
    named = tuple(sorted(tables)) if named_tables(params) else ()
    options = msgspec.structs.replace(options, tables=named, txn=_txn(params.txn))
    check_size(options)
    for table in tables.values():
        check_rules(options, table, source, who)
    return Request(options, start, checked_name(params.name), params.include is not None)


def checked_options(
    params: SubscriptionParams,
    db: str,
    form: str,
    images: tuple[bool, bool],
    source: Readable,
    who: Principal,
    *tables: Table,
) -> Options:
    """Return the options of a subscription to `db` in the format `form`; `columns` must be columns of all `tables`."""
    return Options(
        db=db,
        ops=_ops(params.ops),
        pk=params.pk,
        pk_range=None if params.pk_range is None else _bounds("pk_range", params.pk_range),
        spans=checked_spans(params.spans),
        shard=_shard(params.shard),
        where=_where(params.where, source, who),
        columns=_columns(params.columns, *tables),
        before=images[0],
        after=images[1],
        format=form,
    )


# --- which tables ----------------------------------------------------------------------------------------


def _tables(who: Principal, params: SubscribeTable, source: Readable) -> dict[str, Table]:
    """Return the tables that `params` name; all tables if they name none."""
    if params.table is not None and params.tables is not None:
        raise InvalidRequest("`table` and `tables` exclude each other", hint="Send one of them, or neither for all.")
    found = known = source.describe()
    named = named_tables(params)
    if named is not None:
        names, seen = _unique(named), who.seen(real_name(params.db), known)
        status = source.status() if any(name in known for name in names) else {}  # read once
        found = {name: _captured_table(name, known, status, seen) for name in names}
    narrow = next((field for field in OF_ONE_TABLE if getattr(params, field) is not None), None)
    if narrow and (len(found) != 1 or named is None):
        raise InvalidRequest(
            f"`{narrow}` needs exactly one table, {'none' if named is None else len(found)} given",
            hint="Send its name as `table`, and create one subscription per table.",
        )
    return found


def _unique(named: list[str]) -> list[str]:
    """Return the table names without repeats."""
    names = list(dict.fromkeys(named))
    if len(names) > MOST_TABLES:
        hint = f"Name at most {MOST_TABLES}, leave `tables` out for all, or make several subscriptions."
        raise InvalidRequest(f"`tables` holds {len(names)} names", hint=hint)
    return names


def _captured_table(name: str, known: dict[str, Table], status: dict[str, Any], seen: list[str]) -> Table:
    if name == kv_table.TABLE and name not in known:
        return kv_table.SHAPE  # the first put creates the table; a reader may subscribe before
    if name not in known:
        raise NotFound(f"there is no table {name!r}", hint=nearest(name, seen))
    if name not in status["tables"]:
        raise NotSupported(
            f"table {name!r} has no feed: {status.get('uncaptured', {}).get(name, 'it is not captured')}",
            hint="Check which tables the source is configured to capture; a new table is captured in a moment.",
        )
    return known[name]


# --- which changes ---------------------------------------------------------------------------------------


def _ops(given: list[str] | None) -> tuple[str, ...]:
    """Return the given ops, sorted; empty: all."""
    if given is None:
        return ()
    words = {word.strip().lower() for word in given}
    odd = sorted(words.difference(OPS))
    if odd or not words:
        what = f"`ops` holds {odd[0][:40]!r}" if odd else "`ops` is empty"
        raise InvalidRequest(what, hint=f"Name one or more of {', '.join(OPS)}, or leave it out for all.")
    return tuple(sorted(words))


def _columns(given: list[str] | None, *tables: Table) -> tuple[str, ...]:
    """Return the given names, sorted, which must be columns of all `tables`; empty: all columns."""
    names = {name.strip() for name in given or ()}
    if given is not None and (not names or "" in names):
        raise InvalidRequest("`columns` is empty or holds an empty name", hint="Name columns, or leave it out for all.")
    for table in tables:
        visible = {column.name for column in table.visible}
        for name in sorted(names - visible):
            raise InvalidRequest(
                f"`columns`: table {table.name!r} has no column {name[:40]!r}", hint=nearest(name, visible)
            )
    return tuple(sorted(names))


def checked_spans(given: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the spans of keys; raise InvalidRequest if they are malformed."""
    if given is None:
        return None
    if not given:
        raise InvalidRequest("`spans` is empty", hint="Give at least one span, or leave it out for all keys.")
    if len(given) > MOST_SPANS:
        hint = f"Give at most {MOST_SPANS}, join those that touch, or make several subscriptions."
        raise InvalidRequest(f"`spans` holds {len(given)} spans", hint=hint)
    return [_span(f"spans[{place}]", body) for place, body in enumerate(given)]


def _span(field: str, body: dict[str, Any]) -> dict[str, Any]:
    found = body if set(body) == {"prefix"} else _bounds(field, body)
    for name, lits in found.items():
        if not isinstance(lits, list) or not lits:
            raise InvalidRequest(
                f"`{field}.{name}` is not a list of values", hint='Values look like {"t": "i64", "v": 1}.'
            )
    return found


def _bounds(field: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the given bounds, at least one."""
    odd = sorted(set(given).difference(BOUNDS))
    found = {name: given[name] for name in BOUNDS if given.get(name) is not None}
    if odd or not found:
        what = f"`{field}` has no field {odd[0][:40]!r}" if odd else f"`{field}` has no bound"
        raise InvalidRequest(what, hint=f"Give {' or '.join(BOUNDS)}, or both.")
    return found


def _shard(given: dict[str, Any] | None) -> Shard | None:
    """Return the shard; raise InvalidRequest if it is malformed."""
    if given is None:
        return None
    index, of = given.get("index"), given.get("of")
    fits = set(given) == {"index", "of"} and type(index) is int and type(of) is int and 0 <= index < of <= MOST_SHARDS
    if not fits or index is None or of is None:
        hint = f'Send {{"index": i, "of": n}} with 0 <= i < n <= {MOST_SHARDS}.'
        raise InvalidRequest("`shard` is not a valid shard", hint=hint)
    return Shard(index, of)


def _where(given: str | None, source: Readable, who: Principal) -> str | None:
    """Return the predicate, not yet parsed; raise Forbidden if the caller may not send SQL."""
    if given is not None and not given.strip():
        raise InvalidRequest("`where` is empty", hint="Leave it out to see every row.")
    if given is not None:
        source.check_sql(who.role)
        try:
            given.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("`where`: lone surrogates are not text", hint="Send well-formed Unicode.") from None
    return given


def check_size(options: Options) -> None:
    """Raise InvalidRequest if the options are too large to be stored."""
    try:
        size = len(msgspec.json.encode(options))
    except UnicodeEncodeError:
        raise InvalidRequest("lone surrogates are not text", hint="Send well-formed Unicode.") from None
    if size > MOST_BYTES:
        raise InvalidRequest(
            f"the options are {size} bytes of JSON, more than {MOST_BYTES}",
            hint="Send key ranges instead of single keys, or split the keys among several subscriptions.",
        )


def check_rules(options: Options, table: Table, source: Readable, who: Principal) -> None:
    """Compile each filter on its own for `table`, so that an error names the invalid filter."""
    is_restricted = who.tables(options.db) is not None
    for field in ("pk", "pk_range", "spans", "shard", "where"):
        if (given := getattr(options, field)) is not None:
            alone = Options(db=options.db, **{field: given})
            try:
                permitted_filter(partial(Rule, alone, table, source), is_restricted=is_restricted)
            except InvalidRequest as error:
                raise type(error)(f"`{field}`: {error.message}", hint=error.hint) from None


# --- format, images, start -------------------------------------------------------------------------------


def _format(given: str | None) -> str:
    form = FORMATS[0] if given is None else given
    if form not in FORMATS:
        raise InvalidRequest(f"`format` {form[:40]!r} is not known", hint=f"Formats are {', '.join(FORMATS)}.")
    return form


def checked_images(given: dict[str, Any] | None, form: str, start: Start) -> tuple[bool, bool]:
    """Return whether before images and after images are sent."""
    if given is None:
        both = form in ENVELOPES
        return both, both or start.kind == SNAPSHOT
    for name, value in given.items():
        if name not in ("before", "after") or not isinstance(value, bool):
            raise InvalidRequest(
                f"`include.{name[:40]}` is not before or after with true or false",
                hint='Send {"before": true, "after": true}; a missing field is false.',
            )
    return given.get("before", False), given.get("after", False)


def checked_start(given: str | dict[str, Any] | None, hint: str = STARTS) -> Start:
    """Return the start position; raise InvalidRequest if it is malformed."""
    match given:
        case None:
            return Start()
        case "latest" | "earliest" | "snapshot":
            return Start(given)
        case {"offset": int(offset)} if len(given) == 1 and not isinstance(offset, bool) and 0 <= offset <= I64_MAX:
            return Start(OFFSET, offset)
        case {"ts": (int() | str()) as ts} if len(given) == 1 and not isinstance(ts, bool):
            return Start(TS, _ts(ts))
    raise InvalidRequest("`start` is not a valid start position", hint=hint)


def _ts(given: int | str) -> int:
    try:
        return parse_ts(given) if isinstance(given, str) else ts_of_ms(given)
    except InvalidRequest as error:
        raise InvalidRequest(f"`start.ts`: {error.message}", hint=error.hint) from None


def checked_name(given: str | None) -> str | None:
    """Return the name of a subscription; raise InvalidRequest if it is too long or not printable."""
    if given is not None and not (0 < len(given) <= LONGEST_NAME and given.isprintable()):
        raise InvalidRequest(
            f"`name` is not 1 to {LONGEST_NAME} printable characters",
            hint="Choose a shorter one without control characters and line breaks, or leave it out.",
        )
    return given


def _txn(given: str | None) -> str:
    if given not in (None, ATOMIC, ATOMIC_STRICT):
        raise InvalidRequest(
            f"`txn` {str(given)[:40]!r} is not known", hint=f"Send {ATOMIC!r} or {ATOMIC_STRICT!r}, or leave it out."
        )
    return given or ""
