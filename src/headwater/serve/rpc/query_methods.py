"""The RPC methods query.prepare, query.execute_prepared, query.select and query.explain."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NamedTuple

from headwater.errors import InvalidRequest
from headwater.model.database_name import real_name
from headwater.model.formats import OBJECTS
from headwater.model.literal import Value
from headwater.model.principal import Principal
from headwater.model.query.canonical_json import canonical_bytes
from headwater.model.query.json_form import parse_query_of
from headwater.queries.answers import Answer
from headwater.queries.etag.causality import Token, from_json
from headwater.queries.etag.row_etag import opaque
from headwater.queries.prepared import PreparedQuery
from headwater.queries.queries import Explanation, transient_query
from headwater.queries.statements.pending_answer import PendingAnswer
from headwater.serve.api import Api
from headwater.serve.rpc import query_body
from headwater.serve.rpc.body_pieces import is_small
from headwater.serve.rpc.query_params import Execute, Explain, Prepare, Select, Text, check_cache, values_of
from headwater.sources.query import ReadResult

Args = list[Value] | dict[str, Value]


class QueryText(NamedTuple):
    """The SQL of a query, its database, and the JSON form if it was sent as one."""

    sql: str
    db: str
    form: bytes | None = None


def text_of(api: Api, who: Principal, p: Text, *, tx: str | None = None) -> QueryText:
    """Return the query of a request, in the database of `tx` if it has one; InvalidRequest unless there is one query.

    A method calls this, like all conversion of parameters, before its coroutine: in a thread if the request is large.
    """
    if (p.sql is None) == (p.query is None):
        given = "neither `sql` nor `query`" if p.sql is None else "both `sql` and `query`"
        raise InvalidRequest(f"a query is needed, and the request has {given}", hint="Send one of them.")
    if p.sql is not None:
        return QueryText(p.sql, real_name(p.db))
    tx_db = None if tx is None else api.transactions.database_of(tx)
    query, db = parse_query_of(p.query, db=p.db if tx_db is None else tx_db)
    who.check_any_scope(db)
    source = api.databases.get(db)
    with who.understanding(db):
        return QueryText(source.text(query), db, canonical_bytes(query))


def check_alone(p: Text) -> None:
    """Raise InvalidRequest if a request with `query_id` has another field that names a query."""
    if p.sql is not None or p.query is not None or p.db is not None:
        raise InvalidRequest("`query_id` excludes `sql`, `query` and `db`", hint="Send only `query_id`.")


def prepare(api: Api, who: Principal, p: Prepare) -> Any:
    """Store a query and return its id, a hash of it (query.prepare)."""
    return _prepare(api, who, p, text_of(api, who, p))


async def _prepare(api: Api, who: Principal, p: Prepare, text: QueryText) -> Any:
    return query_body.prepared(await api.asking().prepare(who, text.sql, db=text.db, form=text.form, name=p.name))


def explain(api: Api, who: Principal, p: Explain) -> Any:
    """Return the dependencies of a query, stored or not (query.explain)."""
    if p.query_id is not None:
        check_alone(p)
        return _explained(api.asking().explain_prepared(who, p.query_id))
    text = text_of(api, who, p)
    return _explained(api.asking().explain(who, text.sql, db=text.db))


async def _explained(explanation: Coroutine[Any, Any, Explanation]) -> Any:
    return query_body.explained(await explanation)


def execute(api: Api, who: Principal, p: Execute) -> Any:
    """Execute a stored query and return its result (query.execute_prepared)."""
    prepared = api.asking().get(who, p.query_id)
    return _execute(api, who, prepared, values_of(p.args), p, p.if_none_match, _floor(p.min_causality))


def select(api: Api, who: Principal, p: Select) -> Any:
    """Execute a query without storing it and return its result (query.select)."""
    check_cache(p.cache)
    text, args = text_of(api, who, p, tx=p.tx), values_of(p.args)
    if p.tx is not None:
        return _in_transaction(api, who, p, text.sql, args)
    return _select(api, who, p, transient_query(text.sql, text.db), args, _floor(p.cache.min_causality))


async def _select(api: Api, who: Principal, p: Select, query: PreparedQuery, args: Args, floor: Token | None) -> Any:
    tag = p.cache.if_none_match if p.cache.want_etag else None
    result = await _execute(api, who, query, args, p, tag, floor)
    return result if p.cache.want_etag else {**result, "etag": None}


def _floor(min_causality: Any) -> Token | None:
    return None if min_causality is None else from_json(min_causality)


async def _execute(
    api: Api,
    who: Principal,
    query: PreparedQuery,
    args: Args,
    p: Execute | Select,
    if_none_match: str | None,
    floor: Token | None,
) -> dict[str, Any]:
    format = query_body.rpc_format(p.result_format)
    tags = () if if_none_match is None else (opaque(if_none_match),)
    answer = await api.asking().ask(who, query, args, format=format, tags=tags, floor=floor)
    return await _written(api, answer, format)


async def _written(api: Api, answer: Answer, format: str) -> dict[str, Any]:
    read, about = answer.read, query_body.about(answer)
    if read is None:
        return about
    if is_small(read):
        return about | {"data": query_body.data_of(read, format)}
    return about | {"data": await api.asking().run(query_body.encode_data, read, format)}


async def _in_transaction(api: Api, who: Principal, p: Select, sql: str, args: Args) -> dict[str, Any]:
    """Execute a query inside a transaction, without ETag and token: both describe committed rows only."""
    for name in ("if_none_match", "min_causality"):
        if getattr(p.cache, name) is not None:
            raise InvalidRequest(f"cache.{name} cannot be used inside a transaction", hint="Omit it, or omit `tx`.")
    format = query_body.rpc_format(p.result_format)
    is_object = format == OBJECTS
    found = await api.run(lambda: api.statement.execute(who, sql, args, db=p.db, tx=p.tx, named=is_object, reads=True))
    outcome = found.finish(await asyncio.wrap_future(found.future)) if isinstance(found, PendingAnswer) else found
    read = ReadResult(outcome.columns, outcome.rows, 0, outcome.truncated)
    data = await api.run(lambda: query_body.written_data(read, format))
    return {"etag": None, "not_modified": False, "data": data}
