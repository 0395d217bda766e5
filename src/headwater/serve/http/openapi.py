"""The OpenAPI 3.1 document, built from ROUTES and METHODS so that it is always complete."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater import __version__
from headwater.feeds.options import ATOMIC, ATOMIC_STRICT
from headwater.model.formats import CHANGE_FORMATS
from headwater.ranges.pull.jobs import LZ4
from headwater.serve.auth.gate import Access
from headwater.serve.http.query_string import MAX_OFFSET
from headwater.serve.http.routes import ROUTES, ROW, Route
from headwater.serve.rpc.envelope import MAX_ID
from headwater.serve.rpc.methods import METHODS
from headwater.serve.rpc.results import OBJECTS

_REF = "#/components/schemas/{name}"


def document() -> dict[str, Any]:
    """Return the whole document."""
    _, schemas = msgspec.json.schema_components([method.params for method in METHODS.values()], ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headwater",
            "version": __version__,
            "description": "A data API for SQL databases, and a log of every committed change.",
        },
        "paths": {path: _path(path) for path in dict.fromkeys(route.path for route in ROUTES)},
        "components": {
            "schemas": {**schemas, "Request": _request(), "Answer": _ANSWER, "Problem": _PROBLEM},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _path(path: str) -> dict[str, Any]:
    return {route.method.lower(): _operation(route) for route in ROUTES if route.path == path}


def _operation(route: Route) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": "_".join([route.handler, *route.placeholders]),
        "summary": route.summary,
        "security": [] if route.access is Access.OPEN else [{}, {"bearer": []}, {"apiKey": []}],
        "responses": _RPC_RESPONSES if route.rpc else _ROW_RESPONSES if route.path == ROW else _RESPONSES,
    }
    if parameters := _parameters(route):
        found["parameters"] = parameters
    if route.rpc:
        schema = _ref("Request" if route.handler == "rpc" else "SqlExec")
        found["requestBody"] = {"required": True, "content": _json(schema)}
    elif route.method in ("PUT", "PATCH"):
        found["requestBody"] = {"required": True, "content": _ROW_CONTENT}
    return found


def _parameters(route: Route) -> list[dict[str, Any]]:
    """Return the placeholders of the path, then the parameters of the query string."""
    in_path = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in route.placeholders]
    return in_path + [{"name": name, "in": "query", "schema": _schema(route, name)} for name in route.query]


def _schema(route: Route, name: str) -> dict[str, Any]:
    """Return the schema of a parameter. `start` and `after` are offsets, but keys in pulls of rows."""
    if route.path.startswith("/api/v1/pull/") and (name in ("start", "end") or route.handler + name in _KEYED):
        return _KEY
    return _QUERY.get(name, _TEXT)


def _request() -> dict[str, Any]:
    """Return one alternative per method, distinguished by its name."""
    return {
        "oneOf": [
            {
                "type": "object",
                "description": method.summary,
                "required": ["method"],
                "additionalProperties": False,
                "properties": {
                    "skeinql": {"const": "1.0"},
                    "id": {"type": ["string", "integer", "null"], "maxLength": MAX_ID},
                    "method": {"const": method.name},
                    "params": _ref(method.params.__name__),
                },
            }
            for method in METHODS.values()
        ]
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}


_TEXT: dict[str, Any] = {"type": "string"}
_KEYED = ("pull_snapshotafter",)
_KEY = {"type": "string", "pattern": "^([0-9a-f]{2})*$", "description": "An encoded key, hexadecimal."}
_OFFSET = {"type": "integer", "minimum": 0, "maximum": MAX_OFFSET}
_WORDS = {"type": "string", "description": "Comma-separated words.", "examples": ["insert,update"]}
_QUERY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("from_offset", "upto", "after", "range", "epoch"), _OFFSET),
    "args": {"type": "string", "description": "A JSON array of values.", "examples": ["[1]", '[{"t":"i64","v":1}]']},
    "pk": {"type": "string", "description": "A key as a JSON array.", "examples": ["[1]"]},
    "pk_range": {"type": "string", "description": "Bounds as JSON.", "examples": ['{"lower_bound": 1}']},
    "spans": {"type": "string", "description": "Spans as JSON.", "examples": ['[{"prefix": [1]}]']},
    "ops": _WORDS,
    "include": {**_WORDS, "examples": ["before,after"]},
    "format": {"enum": list(CHANGE_FORMATS)},
    "shard": {"type": "string", "pattern": "^[0-9]{1,9}/[0-9]{1,9}$", "examples": ["0/4"]},
    "start": {"enum": ["latest", "earliest", "snapshot"]},
    "ts": {
        "type": "string",
        "description": "A time in ms since 1970, or a timestamp of an event.",
        "examples": ["1.0"],
    },
    "txn": {"enum": [ATOMIC, ATOMIC_STRICT]},
    "compression": {"enum": [LZ4]},
}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _object(required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object; a property is a schema, or the name of a type."""
    schemas = {name: {"type": kind} if isinstance(kind, str) else kind for name, kind in properties.items()}
    return {"type": "object", "required": required.split(), "properties": schemas}


_ANSWER = _object(
    "id ok",
    id={"type": ["string", "integer", "null"]},
    ok="boolean",
    result={},
    error=_object("code message", code="string", message="string", details="object"),
)
_PROBLEM = _object(
    "type title status code", type="string", title="string", status="integer", code="string", hint="string"
)
_PROBLEM_CONTENT = {"application/problem+json": {"schema": _ref("Problem")}}
_RESPONSES = {
    "200": {"description": "The requested data."},
    "default": {"description": "An error.", "content": _PROBLEM_CONTENT},
}
_RPC_RESPONSES = {
    "200": {"description": "The result or an error, in an envelope.", "content": _json(_ref("Answer"))},
    "204": {"description": "The request was a notification, without an id."},
    "default": {"description": "The request was rejected before it was decoded.", "content": _json(_ref("Answer"))},
}
_ROW_CONTENT = {kind: {"schema": {"type": "object"}} for kind in ("application/json", OBJECTS)}
_ROW_RESPONSES = {
    "200": {"description": "The current row.", "content": _ROW_CONTENT},
    "201": {"description": "The row was created.", "content": _ROW_CONTENT},
    "204": {"description": "The row was deleted."},
    "304": {"description": "The row still has the ETag of If-None-Match."},
    "412": {"description": "A condition in If-Match or If-None-Match is not met.", "content": _PROBLEM_CONTENT},
    "default": {"description": "An error.", "content": _PROBLEM_CONTENT},
}
