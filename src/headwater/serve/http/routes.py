"""The table of HTTP routes, used by the server, the OpenAPI document and the tests of authentication."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote

from headwater.serve.auth.gate import Access

STREAM = ("from_offset", "ticket")
GATEWAY = "/api/v1/ws"
QUERY = "/api/v1/q/{query_id}"
ROW = "/api/v1/t/{db}/{table}/{key}"
MAX_KEY = 1_000  # values of a key: decoding more would block the event loop
FILTERS = ("pk", "pk_range", "spans", "ops", "columns", "include", "format", "where", "shard", "start", "ts", "txn")


@dataclass(frozen=True)
class Route:
    """One route. `handler` names a method of the application; an `rpc` route answers in envelopes."""

    method: str
    path: str
    handler: str
    summary: str
    access: Access = Access.LOCKED
    rpc: bool = False
    stream: bool = False  # answered piece by piece, by `Streams`
    websocket: bool = False
    query: tuple[str, ...] = ()  # parameters of its query string

    @property
    def allow(self) -> str:
        """Return the Allow header: every method of the routes with this path."""
        here = [route.method for route in ROUTES if route.path == self.path]
        return ", ".join("GET, HEAD" if method == "GET" else method for method in here)

    @property
    def placeholders(self) -> list[str]:
        """Return the names in braces in the path."""
        return [part[1:-1] for part in self.path.split("/") if part[:1] == "{"]

    def takes(self, method: str) -> bool:
        """Return whether the route answers requests with `method`."""
        return method == self.method or (method == "HEAD" and self.method == "GET")


ROUTES = (
    Route("POST", "/api/v1/rpc", "rpc", "One RPC request in its envelope.", rpc=True),
    Route("POST", "/api/v1/sql/exec", "sql", "One SQL statement, answered in an envelope.", rpc=True),
    Route("GET", "/", "index", "Name, version and routes of this server."),
    Route("GET", "/healthz", "healthz", "200 while the process is alive.", Access.OPEN),
    Route(
        "GET",
        "/readyz",
        "readyz",
        "200 while capture runs, 503 with the reasons while it does not.",
        Access.OPEN,
        query=("db",),
    ),
    Route("GET", "/metrics", "metrics", "Metrics for Prometheus.", Access.METRICS),
    Route("GET", "/openapi.json", "openapi", "The OpenAPI document."),
    Route("GET", "/docs", "docs", "A page that lists the routes and methods."),
    Route("GET", "/api/v1/cdc/sse/{sub_id}", "sse", "A subscription as server-sent events.", stream=True, query=STREAM),
    Route("GET", "/api/v1/cdc/ws/{sub_id}", "ws", "A subscription as a WebSocket.", websocket=True, query=STREAM),
    Route("GET", GATEWAY, "gateway", "SQL, keys and changes in JSON messages.", websocket=True, query=("ticket",)),
    Route(
        "GET",
        "/api/v1/changes/{db}/{table}",
        "changes",
        "Changes of a table without a stored subscription: SSE, NDJSON or Arrow.",
        stream=True,
        query=(*STREAM, "upto", *FILTERS),
    ),
    Route(
        "GET",
        "/api/v1/changes/{db}",
        "changes",
        "Changes of every table of a database: SSE or NDJSON.",
        stream=True,
        query=(*STREAM, "upto", *FILTERS),
    ),
    Route(
        "GET",
        "/api/v1/snapshot/{db}/{table}",
        "snapshot",
        "A whole table as of one version: NDJSON or Arrow.",
        stream=True,
        query=("version", "format", "ticket"),
    ),
    Route(
        "GET",
        "/api/v1/pull/{db}/{table}/snapshot",
        "pull_snapshot",
        "Rows of a key range as of one version: Arrow.",
        stream=True,
        query=("range", "epoch", "version", "after", "start", "end", "columns", "where", "ticket"),
    ),
    Route(
        "GET",
        "/api/v1/pull/{db}/{table}/log",
        "pull_log",
        "Changes of a table in an offset range of the log: Arrow.",
        stream=True,
        query=("after", "upto", "generation", "shape", "start", "end", "columns", "where", "compression", "ticket"),
    ),
    Route(
        "GET",
        "/api/v1/pull/{db}/log",
        "pull_tables",
        "Changes of several tables in an offset range of the log, rows as JSON: Arrow.",
        stream=True,
        query=("tables", "after", "upto", "generation", "ticket"),
    ),
    Route("GET", QUERY, "query", "The answer of a prepared query, with its ETag.", query=("args", "ticket")),
    Route(
        "GET",
        f"{QUERY}/events",
        "query_events",
        "Invalidations of a prepared query: server-sent events, or a WebSocket by upgrade.",
        stream=True,
        websocket=True,
        query=("args", *STREAM),
    ),
    Route("GET", ROW, "get_row", "One row by its key, with its ETag."),
    Route("PUT", ROW, "put_row", "Create or replace one row."),
    Route("PATCH", ROW, "patch_row", "Set columns of one row."),
    Route("DELETE", ROW, "delete_row", "Delete one row."),
)
BY_PATH = {route.path: route for route in ROUTES if "{" not in route.path}
PATTERNS = [(route.path.split("/"), route) for route in ROUTES if "{" in route.path]


def find(path: str, raw_path: bytes, method: str = "GET") -> tuple[Route | None, dict[str, str]]:
    """Return the route of a request and the values of its placeholders; a slash inside a value is sent as %2F.

    If no route of the path has `method`, return the first one: its error names the allowed methods.
    """
    route = BY_PATH.get(path)
    if route is not None:
        return route, {}
    parts = raw_path.decode("ascii", "replace").split("/")
    fitting = [
        (route, pattern)
        for pattern, route in PATTERNS
        if len(pattern) == len(parts)
        and all(want == part or (want[:1] == "{" and part) for want, part in zip(pattern, parts, strict=True))
    ]
    if not fitting:
        return None, {}
    route, pattern = next((each for each in fitting if each[0].takes(method)), fitting[0])
    return route, {want[1:-1]: _unquoted(part) for want, part in zip(pattern, parts, strict=True) if want[:1] == "{"}


def key_parts(raw_path: bytes) -> tuple[str, ...]:
    """Return the comma-separated values at the end of a path; a comma inside a value is sent as %2C.

    At most one value more than MAX_KEY is returned: no table has such a key.
    """
    parts = raw_path.decode("ascii", "replace").rpartition("/")[2].split(",")
    return tuple(map(_unquoted, parts[: MAX_KEY + 1]))


def _unquoted(part: str) -> str:
    return unquote(part, errors="surrogateescape")  # as `snapshot_url` quotes: names need not be valid Unicode
