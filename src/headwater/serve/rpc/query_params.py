"""The parameters of the query methods."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.literal import Value, from_json, to_lit
from headwater.serve.rpc.params import Params

MAX_ARGS = 32_766  # SQLite's own limit


class Text(Params):
    """A query: SQL text, or the JSON form."""

    sql: str | None = None
    query: Any = None
    db: str | None = None


class Prepare(Text):
    """Parameters of query.prepare."""

    name: str | None = None


class Explain(Text):
    """Parameters of query.explain: a query, or the id of a stored one."""

    query_id: str | None = None


class Cache(Params):
    """The parameter `cache` of query.select."""

    want_etag: bool = True
    if_none_match: str | None = None
    min_causality: Any = None
    mode: str | None = None
    persist: bool | None = None


class Select(Text):
    """Parameters of query.select."""

    unserved = ("wire", "as_of")
    args: list[Any] | dict[str, Any] = []
    result_format: str | None = None
    cache: Cache = msgspec.field(default_factory=Cache)
    wire: Any = None
    as_of: Any = None
    tx: str | None = None


class Execute(Params):
    """Parameters of query.execute_prepared."""

    unserved = ("wire",)
    query_id: str
    args: list[Any] | dict[str, Any] = []
    if_none_match: str | None = None
    min_causality: Any = None
    result_format: str | None = None
    wire: Any = None


class QuerySubscribe(Params):
    """Parameters of query.subscribe."""

    query_id: str
    args: list[Any] | dict[str, Any] = []


class Patch(Text):
    """Parameters of query.patch: a query, and the result that the caller has, by ETag or by `client_state`."""

    unserved = ("wire",)
    query_id: str | None = None
    args: list[Any] | dict[str, Any] = []
    base_etag: str | None = None
    result_format: str | None = None
    include_full: bool = True
    client_state: Any = None
    wire: Any = None


def values_of(args: list[Any] | dict[str, Any], field: str = "args") -> list[Value] | dict[str, Value]:
    """Return the arguments, Lits or plain JSON, as values; errors name `field`."""
    if len(args) > MAX_ARGS:
        raise InvalidRequest(
            f"`{field}` has {len(args)} values; at most {MAX_ARGS} can be bound", hint="Send fewer values."
        )
    if isinstance(args, dict):
        return {name: value_at(body, f"{field}.{name}") for name, body in args.items()}
    return [value_at(body, f"{field}[{place}]") for place, body in enumerate(args)]


def lits_of(values: list[Value] | dict[str, Value]) -> list[Any] | dict[str, Any]:
    """Return the arguments as Lits, so that equal arguments are equal however they were sent."""
    if isinstance(values, dict):
        return {name: to_lit(value) for name, value in sorted(values.items())}
    return [to_lit(value) for value in values]


def value_at(body: Any, path: str) -> Value:
    """Return a Lit or plain JSON as a value; an error names `path`."""
    try:
        return from_json(body)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error.message}", hint=error.hint) from None


def check_cache(cache: Cache) -> None:
    """Raise NotSupported for cache options that are not implemented."""
    if cache.mode not in (None, "default"):
        raise NotSupported(f"cache.mode {cache.mode[:40]!r} is not supported", hint="Omit it.")
    if cache.persist:
        raise NotSupported("cache.persist is not supported", hint="Store the query with query.prepare.")
