"""Patches between query results: 226 responses to a GET with `A-IM`, and query.patch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headwater.errors import InvalidRequest, NotSupported, Unavailable
from headwater.model.formats import ARROW, CSV
from headwater.model.principal import Principal
from headwater.model.work.answer_limits import bytes_of
from headwater.queries.answers import Answer
from headwater.queries.etag.row_etag import opaque
from headwater.queries.patch import patch
from headwater.queries.patch.client_state import ClientState, diff_state
from headwater.queries.patch.recent_results import Results
from headwater.queries.prepared import PreparedQuery
from headwater.queries.queries import transient_query
from headwater.serve.api import Api
from headwater.serve.rpc.query_body import about, columns_of, rpc_format
from headwater.serve.rpc.query_methods import Args, check_alone, text_of
from headwater.serve.rpc.query_params import Patch, values_of
from headwater.sources.query import ReadResult

MANIPULATION = b"headwater-rows"
MAX_PATCHED = 8 << 20  # bytes of a result: larger ones get no patches
PATCHED = 226  # IM Used, RFC 3229


def has_patches(read: ReadResult) -> bool:
    """Return whether a result is whole, and small enough for patches."""
    return not read.truncated and bytes_of(read.rows) <= MAX_PATCHED


def wants_patch(a_im: bytes, format: str) -> bool:
    """Return whether a request accepts patches and its format supports them."""
    named = [part.split(b";")[0].strip().lower() for part in a_im.split(b",")]
    return MANIPULATION in named and format not in (CSV, ARROW)


def patched(results: Results, answer: Answer, format: str, tags: Sequence[str]) -> tuple[int, bytes]:
    """Return 226 and the patch from a stored result that one of `tags` names, or 200 and the whole result."""
    assert answer.read is not None
    prefix = answer.instance.prefix(format)
    base = next((found for tag in tags if (found := results.find(prefix, tag)) is not None), None)
    fresh = _remembered(results, answer, format, base)
    if base is not None:
        made = patch.diff(base, fresh, include_full=False)
        if not made["reset"]:
            return PATCHED, msgspec.json.encode(made)
    data = {"columns": columns_of(answer.read), "rows": msgspec.Raw(fresh.rows_text)}
    return 200, msgspec.json.encode({"etag": answer.etag, "data": data})


def _remembered(results: Results, answer: Answer, format: str, base: patch.Answer | None) -> patch.Answer:
    """Return the result as it is sent, and store it as the base of the next patch."""
    assert answer.read is not None and answer.etag is not None
    prefix, analysis = answer.instance.prefix(format), answer.instance.analysis
    fresh = patch.Answer.of(
        answer.etag,
        columns_of(answer.read),
        answer.read.rows,
        key=analysis.key,
        ordered=analysis.is_total,
        form=patch.FORMS[format],
        like=base or results.latest(prefix),
    )
    results.keep(prefix, fresh)
    return fresh


def patch_method(api: Api, who: Principal, p: Patch) -> Any:
    """Return the difference of a query's result to the result that the caller has (query.patch)."""
    format, args = rpc_format(p.result_format), values_of(p.args)
    if p.query_id is not None:
        check_alone(p)
        return _patch(api, who, p, api.asking().get(who, p.query_id), args, format)
    text = text_of(api, who, p)
    return _patch(api, who, p, transient_query(text.sql, text.db), args, format)


async def _patch(api: Api, who: Principal, p: Patch, query: PreparedQuery, args: Args, format: str) -> Any:
    asking = api.asking()
    tags = () if p.base_etag is None else (opaque(p.base_etag),)
    answer = await asking.ask(who, query, args, format=format, tags=tags)
    if answer.read is None:
        return about(answer)
    if not has_patches(answer.read) or not answer.instance.analysis.is_cacheable:
        reason = "is not cacheable" if has_patches(answer.read) else "is too large"
        raise NotSupported(f"there are no patches: the result {reason}", hint="Request the whole result.")
    if answer.etag is None:
        raise Unavailable("the result has no offset yet, so no patch", hint="Retry, or request the whole result.")
    made: bytes = await asking.run(_diff, asking.results, answer, format, p)
    return about(answer) | {"data": msgspec.Raw(made)}


def _diff(results: Results, answer: Answer, format: str, p: Patch) -> bytes:
    base = None if p.base_etag is None else results.find(answer.instance.prefix(format), opaque(p.base_etag))
    fresh = _remembered(results, answer, format, base)
    if base is not None:
        made = patch.diff(base, fresh, include_full=p.include_full)
    elif p.client_state is not None:
        made = diff_state(_state(p.client_state), fresh, p.base_etag, include_full=p.include_full)
    else:
        made = patch.reset(fresh, p.base_etag, "base_unknown", include_full=p.include_full)
    return msgspec.json.encode(made)


def _state(body: Any) -> ClientState:
    try:
        return msgspec.convert(body, ClientState)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidRequest(f"client_state: {error}", hint="Send mode and rows, see docs/js-client.md.") from None
