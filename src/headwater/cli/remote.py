"""Asking a running server: one RPC request over HTTP, its refusal as a Failure."""

from __future__ import annotations

import argparse
import http.client
import json
import select
import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from headwater.cli.commands.config import add_token_file, load_config
from headwater.cli.connection_failure import unreachable
from headwater.cli.failure import FAILED, UNREACHABLE, USAGE, Failure

if TYPE_CHECKING:
    from headwater.config import ServeConfig

TIMEOUT_SECONDS = 60.0


def add_server(parser: argparse.ArgumentParser) -> None:
    """Which server to ask."""
    parser.add_argument("--server", metavar="URL", help="the server to ask (http://127.0.0.1:7171)")
    parser.add_argument("--ca", metavar="FILE", help="authorities in PEM to trust besides the system's")
    add_token_file(parser)


class Remote:
    """One server. Keeps its connection open between requests; not for two threads."""

    def __init__(self, url: str, token: str | None = None, ca: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise Failure(f"{url!r} is not the URL of a server", hint="http://127.0.0.1:7171", exit_code=USAGE)
        if parts.username or parts.password:
            raise Failure(
                "a URL with a password is seen by other users",
                hint="Use HEADWATER_TOKEN or --token-file.",
                exit_code=USAGE,
            )
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.tls = _trusting(ca) if parts.scheme == "https" else None
        self._connection = connection_to(self.url, self.tls, TIMEOUT_SECONDS)
        self._headers = {"content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"

    def call(self, method: str, **params: Any) -> Any:
        """The result of an RPC method."""
        body = json.dumps({"id": 1, "method": method, "params": params}).encode()
        answer = self._decoded(self._request("POST", "/api/v1/rpc", body)[1])
        if not answer.get("ok"):
            raise _refusal(answer.get("error") or {})
        return answer["result"]

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET."""
        return self._request("GET", path, None)

    def close(self) -> None:
        """Let the connection go."""
        self._connection.close()

    def _request(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        self._leave_what_was_closed()
        try:
            self._connection.request(method, path, body, self._headers)
            response = self._connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise unreachable(self.url, error) from None

    def _leave_what_was_closed(self) -> None:
        """A connection that the server ended while nothing was asked is readable: the next request opens another."""
        sock = self._connection.sock
        if sock is not None and select.select([sock], [], [], 0)[0]:
            self._connection.close()

    def _decoded(self, body: bytes) -> dict[str, Any]:
        try:
            found = json.loads(body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Failure(f"{self.url} is not a Headwater server", exit_code=UNREACHABLE)
        return found


def open_remote(args: argparse.Namespace) -> Remote:
    """The server of --server, or the one the settings here would start."""
    config = load_config(args)
    token = None if config.serve.token is None else config.serve.token.encode().decode()
    return Remote(args.server or _here(config.serve), token, getattr(args, "ca", None) or config.ca)


def connection_to(url: str, tls: ssl.SSLContext | None, timeout: float) -> http.client.HTTPConnection:
    """A connection to the server at `url`, not opened yet."""
    parts = urlsplit(url)
    if tls is None:
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=timeout, context=tls)


def _trusting(ca: str | None) -> ssl.SSLContext:
    from headwater.client.tls_trust import trusting  # imported late: few commands need it

    return trusting(ca)


def _here(serve: ServeConfig) -> str:
    host, _, port = serve.http.rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    return f"{'http' if serve.tls_cert is None else 'https'}://{host}:{port}"


def _refusal(error: dict[str, Any]) -> Failure:
    details = error.get("details") or {}
    message = f"{error.get('message', 'the server refused')} ({error.get('code', 'internal')})"
    hint = str(details.get("hint", ""))
    if error.get("code") == "unauthorized":
        hint = "Set HEADWATER_TOKEN, or name a file that holds the credential with --token-file."
    return Failure(message, hint=hint, exit_code=FAILED)
