"""ROUTES: every HTTP route as data; the server, the OpenAPI document and the auth tests follow it."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.serve.auth import Access


@dataclass(frozen=True)
class Route:
    """One route. `handler` names a method of the application; an `rpc` one answers in envelopes."""

    method: str
    path: str
    handler: str
    summary: str
    access: Access = Access.LOCKED
    rpc: bool = False

    @property
    def allow(self) -> str:
        """The Allow header."""
        return "GET, HEAD" if self.method == "GET" else self.method

    def takes(self, method: str) -> bool:
        """Whether a request by `method` is for this route."""
        return method == self.method or (method == "HEAD" and self.method == "GET")


ROUTES = (
    Route("POST", "/api/v1/rpc", "rpc", "One RPC request in its envelope.", rpc=True),
    Route("POST", "/api/v1/sql/exec", "sql", "One SQL statement, answered in an envelope.", rpc=True),
    Route("GET", "/", "index", "What this server is and where its doors are."),
    Route("GET", "/healthz", "healthz", "200 while the process is alive.", Access.OPEN),
    Route("GET", "/readyz", "readyz", "200 once every database is captured, 503 before.", Access.OPEN),
    Route("GET", "/metrics", "metrics", "Numbers for Prometheus.", Access.METRICS),
    Route("GET", "/openapi.json", "openapi", "This document."),
)
BY_PATH = {route.path: route for route in ROUTES}
