"""The page at /docs: every route and RPC method, from the same tables as the OpenAPI document."""

from __future__ import annotations

import functools
from html import escape

from headwater import __version__
from headwater.serve.auth.gate import Access
from headwater.serve.http.routes import ROUTES, Route
from headwater.serve.rpc.methods import METHODS, Method

POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .3rem .6rem; vertical-align: top }
tr:nth-child(even) { background: #f5f5f5 } code { font-size: 14px }
"""


@functools.cache
def page() -> str:
    """Return the HTML. It loads nothing and runs no script."""
    routes = "".join(map(_route, ROUTES))
    methods = "".join(_method(METHODS[name]) for name in sorted(METHODS))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Headwater {escape(__version__)}</title><style>{_STYLE}</style></head>
<body><h1>Headwater {escape(__version__)}</h1>
<p>The same as a machine-readable document: <a href="/openapi.json">/openapi.json</a>.</p>
<h2>Routes</h2>
<table><tr><th>Method</th><th>Path</th><th>Parameters</th><th>Credential</th><th></th></tr>{routes}</table>
<h2>Methods of <code>POST /api/v1/rpc</code></h2>
<table><tr><th>Method</th><th>Role</th><th>Parameters</th><th></th></tr>{methods}</table>
</body></html>
"""


def _route(route: Route) -> str:
    needed = "none" if route.access is Access.OPEN else "if the server requires one"
    cells = (route.method, f"<code>{escape(route.path)}</code>", escape(", ".join(route.query)), needed)
    return _row(*cells, escape(route.summary))


def _method(method: Method) -> str:
    fields = ", ".join(method.params.__struct_fields__)
    return _row(f"<code>{escape(method.name)}</code>", method.role, escape(fields), escape(method.summary))


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
