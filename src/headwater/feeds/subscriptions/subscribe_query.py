"""Validation of the parameters of `cdc.subscribe_query`."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.errors import HeadwaterError, InvalidRequest, NotSupported
from headwater.feeds.options import Options
from headwater.feeds.query_feeds.query_instances import Args, QueryInstance
from headwater.feeds.subscriptions.subscribe_table import (
    OFFSET,
    SNAPSHOT,
    Request,
    Start,
    SubscriptionParams,
    check_rules,
    check_size,
    checked_images,
    checked_name,
    checked_options,
    checked_start,
)
from headwater.model.formats import CHANGE_FORMATS
from headwater.model.formats import INVALIDATION_FORMATS as FORMATS
from headwater.model.principal import ADMIN, Principal
from headwater.model.suggestion import nearest
from headwater.model.table import Table
from headwater.sources.read import Readable

NARROW = ("pk", "pk_range", "spans", "shard", "where", "columns")  # filters that may not fit every table of the query

STARTS = 'Send "latest", "earliest", {"offset": n}, {"ts": "<ms>.<counter>"} or {"etag": tag} of a result.'


class SubscribeQuery(SubscriptionParams, forbid_unknown_fields=True, kw_only=True):
    """The parameters of cdc.subscribe_query."""

    query_id: str
    args: list[Any] | dict[str, Any] | None = None
    confirm: bool = False


def check_query(
    params: SubscribeQuery, args: Args, instance: QueryInstance, db: str, source: Readable, who: Principal = ADMIN
) -> Request:
    """Check `params` against the instance that they name; raise InvalidRequest with the invalid field."""
    start = _start(params.start, instance)
    form = _format(params.format)
    images = checked_images(params.include, "", start)
    options = checked_options(params, db, form, images, source, who)
    of_query = {"query_id": instance.query_id, "args": args or None, "confirm": params.confirm}
    options = msgspec.structs.replace(options, **of_query)
    check_size(options)
    options = msgspec.structs.replace(options, tables=_fitting(options, instance, source, who))
    return Request(options, start, checked_name(params.name), params.include is not None)


def _format(given: str | None) -> str:
    form = FORMATS[0] if given is None else given
    if form in FORMATS:
        return form
    hint = f"Formats of query feeds are {', '.join(FORMATS)}."
    if form in CHANGE_FORMATS:
        raise NotSupported(f"`format` {form!r} cannot represent invalidations", hint=hint)
    raise InvalidRequest(f"`format` {form[:40]!r} is not known", hint=hint)


def _start(given: str | dict[str, Any] | None, instance: QueryInstance) -> Start:
    if isinstance(given, dict) and set(given) == {"etag"} and isinstance(given["etag"], str):
        offset = instance.offset_of(given["etag"])
        if offset is None:
            raise InvalidRequest(
                f"`start.etag` {given['etag'][:80]!r} is not an ETag of this query and these arguments in this schema",
                hint="Run the query again and start with the ETag of its result.",
            )
        return Start(OFFSET, offset)
    start = checked_start(given, STARTS)
    if start.kind == SNAPSHOT:
        hint = 'Run the query, then subscribe with start:{"etag": …} of its result: no change is missed in between.'
        raise InvalidRequest("a query feed has no snapshot of its own", hint=hint)
    return start


def _fitting(options: Options, instance: QueryInstance, source: Readable, who: Principal) -> tuple[str, ...]:
    """Return the tables of the query for which the filter is valid; empty if there is no filter.

    The filter applies to the triggering change, so it may be valid for some tables of the query only. Changes of the
    other tables never pass it. A filter that is valid for no table raises an error.
    """
    if not any(getattr(options, field) for field in NARROW):
        return ()
    known = source.describe()
    tables = [known[name] for name in instance.tables if name in known]
    fitting, refused = [], None
    for table in tables:
        error = _misfit(options, table, source, who)
        if error is None:
            fitting.append(table.name)
        refused = refused or error
    if not fitting:
        raise refused or InvalidRequest(
            "the query reads no table whose changes could pass the filter", hint="Leave out the filter."
        )
    return tuple(sorted(fitting))


def _misfit(options: Options, table: Table, source: Readable, who: Principal) -> HeadwaterError | None:
    names = [column.name for column in table.visible]
    unknown = [name for name in options.columns if name not in names]
    if unknown and len(unknown) == len(options.columns):
        what = f"`columns`: table {table.name!r} has no column {unknown[0][:40]!r}"
        return InvalidRequest(what, hint=nearest(unknown[0], names))
    try:
        check_rules(options, table, source, who)
    except InvalidRequest as error:
        return error
    return None
