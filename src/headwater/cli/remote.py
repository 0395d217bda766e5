"""RPC calls of commands to a running server; an error becomes a Failure."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from headwater.cli.commands.config import add_token_file, credential, load_config
from headwater.cli.connection_failure import transport_error, unreachable
from headwater.cli.failure import FAILED, UNREACHABLE, Failure
from headwater.cli.output.tables import add_output
from headwater.errors import HeadwaterError

if TYPE_CHECKING:
    from headwater.config import ServeConfig

TIMEOUT_SECONDS = 60.0


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the server."""
    parser.add_argument("--server", metavar="URL", help="the server to ask (http://127.0.0.1:7171)")
    parser.add_argument("--ca", metavar="FILE", help="authorities in PEM to trust besides the system's")
    add_token_file(parser)


def add_verb(group: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    """Add a verb that calls a server and prints the result; return its parser."""
    parser: argparse.ArgumentParser = group.add_parser(name, help=text, allow_abbrev=False)
    add_server(parser)
    add_output(parser)
    parser.set_defaults(run=run)
    return parser


class Remote:
    """Calls to one server, each sent once. Not thread-safe."""

    def __init__(self, url: str, token: str | None = None, ca: str | None = None) -> None:
        # Imported late: most commands need neither the client nor msgspec.
        from headwater.client.http_connections import Connections
        from headwater.client.protocol import parse_url
        from headwater.client.tls_trust import tls_context

        server = parse_url(url)
        self.url, self.token = server.url, token
        self.tls = tls_context(ca) if server.scheme == "https" else None
        self._connections = Connections(server, token, TIMEOUT_SECONDS, self.tls)

    def call(self, method: str, **params: Any) -> Any:
        """Return the result of an RPC method; Failure if the server refuses the call or does not answer."""
        from headwater.client.protocol import RPC, Request

        body = json.dumps({"id": 1, "method": method, "params": params}).encode()
        request = Request("POST", RPC, {"content-type": "application/json"}, body)
        try:
            answer = self._decoded(self._connections.exchange(request)[2])
        except HeadwaterError as error:
            raise unreachable(self.url, transport_error(error)) from None
        if not answer.get("ok"):
            raise _refusal(answer.get("error") or {})
        return answer["result"]

    def close(self) -> None:
        """Close the connection."""
        self._connections.close()

    def _decoded(self, body: bytes) -> dict[str, Any]:
        try:
            found = json.loads(body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Failure(f"{self.url} is not a Headwater server", exit_code=UNREACHABLE)
        return found


def open_remote(args: argparse.Namespace) -> Remote:
    """Return calls to the server of --server, or else to the one that `headwater serve` starts with these settings."""
    config = load_config(args)
    return Remote(args.server or _here(config.serve), credential(config), getattr(args, "ca", None) or config.ca)


def _here(serve: ServeConfig) -> str:
    host, _, port = serve.http.rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    return f"{'http' if serve.tls_cert is None else 'https'}://{host}:{port}"


def _refusal(error: dict[str, Any]) -> Failure:
    details = error.get("details") or {}
    code = str(error.get("code", "internal"))
    message = f"{error.get('message', 'the server refused')} ({code})"
    hint = str(details.get("hint", ""))
    if code == "unauthorized":
        hint = "Set HEADWATER_TOKEN, or name a file that holds the credential with --token-file."
    return Failure(message, hint=hint, exit_code=FAILED, code=code)
