"""Query strings of requests, parsed to the parameters of RPC methods."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, unquote_plus

import msgspec

from headwater.errors import InvalidRequest
from headwater.feeds.subscriptions.subscribe_table import SubscribeTable
from headwater.model import json_decoder
from headwater.model.formats import OBJECTS, PLAIN
from headwater.model.literal import from_json, to_lit

MAX_OFFSET = 2**63 - 1
MAX_PARAMETERS = 64  # of a query string
MAX_VALUES = 4_000  # of a list in a query string: converting more would block the event loop


def parse_query(query: bytes, known: tuple[str, ...], path: str) -> dict[str, str]:
    """Return the parameters by name; InvalidRequest for unknown or repeated ones and bad escapes."""
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, strict_parsing=True, errors="strict")
    except ValueError:
        if query:
            raise InvalidRequest("the query string cannot be read", hint="Send name=value&name=value.") from None
        pairs = []
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            hint = f"Known parameters are {', '.join(known)}." if known else "Omit it."
            what = f"{path} takes no parameter {name[:40]!r}" if known else f"{path} takes no query string"
            raise InvalidRequest(what, hint=hint)
        if name in found:
            raise InvalidRequest(f"parameter {name!r} is repeated", hint=f"Send {name} once.")
        found[name] = value
    return found


def ticket_in(query: bytes) -> str | None:
    """Return the ticket in a query string, without checking anything else; InvalidRequest for too many parameters.

    This is called before the caller is authenticated, so it decodes only names that can be `ticket`.
    """
    if query.count(b"&") >= MAX_PARAMETERS:
        raise InvalidRequest(f"the query string has more than {MAX_PARAMETERS} parameters", hint="Send fewer.")
    if b"ticket" in query or b"%" in query:
        for pair in query.decode("latin-1").split("&"):
            name, _, value = pair.partition("=")
            if len(name) <= len("%74%69%63%6b%65%74") and unquote_plus(name) == "ticket":
                return unquote_plus(value)
    return None


def digits(text: str, most: int) -> bool:
    """Return whether `text` has at most `most` characters, all of them ASCII digits."""
    return text.isascii() and text.isdigit() and len(text) <= most


def number(query: dict[str, str], name: str) -> int | None:
    """Return the offset in parameter `name`; None without one."""
    text = query.get(name)
    if text is None:
        return None
    if not digits(text, 19) or int(text) > MAX_OFFSET:
        raise InvalidRequest(f"{name} {text[:40]!r} is not an offset", hint=f"Send an integer from 0 to {MAX_OFFSET}.")
    return int(text)


def changes_asked(values: dict[str, str], query: dict[str, str]) -> tuple[SubscribeTable, int | None]:
    """Return the filter of a stream without a subscription, and its end. Rows are included by default."""
    include = _words(query, "include")
    start: Any = query.get("start")
    if "ts" in query:
        if start is not None:
            raise InvalidRequest("`start` and `ts` exclude each other", hint="Send one of them.")
        start = {"ts": int(query["ts"]) if digits(query["ts"], 15) else query["ts"]}
    elif start is not None and start not in ("latest", "earliest", "snapshot"):
        raise InvalidRequest(
            f"start {start[:40]!r} is unknown",
            hint="Send latest, earliest or snapshot; for an offset use from_offset=3, for a time ts=1763172000000.",
        )
    params = SubscribeTable(
        db=values["db"],
        table=values.get("table"),
        pk=_lits(_json(query, "pk", list), "pk"),
        pk_range=_bounds(_json(query, "pk_range", dict)),
        spans=plain_spans(_json(query, "spans", list)),
        ops=_words(query, "ops"),
        columns=_words(query, "columns"),
        include={"after": True} if include is None else dict.fromkeys(filter(None, include), True),
        format=query.get("format"),
        where=query.get("where"),
        shard=_shard(query.get("shard")),
        start=start,
        txn=query.get("txn"),
    )
    if include is None and params.format not in (None, OBJECTS, PLAIN):
        params.include = None  # envelopes show both images by themselves
    return params, number(query, "upto")


def list_in(query: dict[str, str], name: str) -> str | None:
    """Return the list in parameter `name`, None without one; InvalidRequest if it has more than MAX_VALUES values."""
    text = query.get(name)
    if text is not None and text.count(",") >= MAX_VALUES:
        raise InvalidRequest(f"{name} has more than {MAX_VALUES} values", hint="Send fewer in one request.")
    return text


def _words(query: dict[str, str], name: str) -> list[str] | None:
    text = list_in(query, name)
    return None if text is None else [word.strip() for word in text.split(",")]


def _json(query: dict[str, str], name: str, wanted: type) -> Any:
    text = list_in(query, name)
    if text is None:
        return None
    try:
        found = json_decoder.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        found = None
    if not isinstance(found, wanted):
        example = {"pk": "[1]", "pk_range": '{"lower_bound": 1}', "spans": '[{"prefix": [1]}]'}[name]
        raise InvalidRequest(f"{name} cannot be read", hint=f"Send JSON, percent-encoded, such as {example}.")
    return found


def _lits(values: Any, field: str) -> list[Any] | None:
    """Return the values as Lits; plain JSON values are accepted too."""
    if values is None:
        return None
    if not isinstance(values, list):
        raise InvalidRequest(f"{field}: a list of values was expected", hint="Send the values of a key, such as [1].")
    return [to_lit(from_json(value)) for value in values]


def _bounds(given: Any) -> Any:
    return None if given is None else {name: to_lit(from_json(value)) for name, value in given.items()}


def plain_spans(given: Any) -> Any:
    """Return spans with Lits as key values; plain JSON values are accepted too."""
    if given is None:
        return None
    if not all(isinstance(span, dict) for span in given):
        raise InvalidRequest("spans: a list of objects was expected", hint='Send such as [{"prefix": [1]}].')
    return [{name: _lits(values, f"spans.{name}") for name, values in span.items()} for span in given]


def _shard(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    index, slash, of = text.partition("/")
    if not (slash and digits(index, 9) and digits(of, 9)):
        raise InvalidRequest("shard cannot be read", hint="Send index/of, such as 0/4.")
    return {"index": int(index), "of": int(of)}
