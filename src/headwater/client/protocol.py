"""Requests, answers and errors of the wire, and the rule by which a request may be sent again. No I/O."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from headwater.client.responses import WireRange
from headwater.errors import (
    CLASSES,
    ConfigError,
    Forbidden,
    HeadwaterError,
    InvalidRequest,
    NotFound,
    OffsetExpired,
    Unauthorized,
    Unavailable,
)
from headwater.model.keys.range import Range
from headwater.model.url_secrets import has_secrets

T = TypeVar("T")

ARROW_KIND = "application/vnd.apache.arrow.stream"
EVENT_STREAM = "text/event-stream"
RPC = "/api/v1/rpc"
# These methods are idempotent: after a lost answer they are sent again.
REPEATABLE = frozenset(
    {
        *("system.ping", "system.version", "system.capabilities", "stats.snapshot", "security.ticket.create"),
        *("schema.list_databases", "schema.list_tables", "schema.describe_table", "data.get"),
        *("cdc.poll", "cdc.ack", "cdc.list", "cdc.backtest", "cdc.pause", "cdc.resume"),
        *("pull.describe", "pull.changed_tables", "pull.ranges", "pull.register", "pull.release"),
    }
)


class RetryPolicy(enum.Enum):
    """After which failures a request may be sent again."""

    ANY = "after any failure: the request reads, or is idempotent"
    REFUSED = "if it was surely not carried out: never sent, or refused with a retryable error"
    UNSENT = "only if it was never sent: inside a transaction the caller must restart the transaction"


class Server(NamedTuple):
    """The address of a server."""

    scheme: str
    host: str
    port: int | None
    url: str


class Request(NamedTuple):
    """One request; `wait_seconds` is how long the server may wait before it answers, beyond the timeout."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes | None = None
    repeat: RetryPolicy = RetryPolicy.ANY
    wait_seconds: float = 0.0


# --- server and credential -------------------------------------------------------------------------------


def parse_url(url: str) -> Server:
    """Return the server that `url` names; ConfigError for anything but scheme, host and port."""
    whole = url if "://" in url else f"http://{url}"
    parts = urlsplit(whole)
    if parts.username or parts.password or has_secrets(whole):
        # The error must not repeat the URL: it holds a password.
        raise ConfigError("a URL with a password is seen by other users", hint="Use HEADWATER_TOKEN or a token file.")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme not in ("http", "https") or not host or parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is not the URL of a server", hint="Such as http://127.0.0.1:7171.")
    return Server(parts.scheme, host, port, f"{parts.scheme}://{parts.netloc}")


def find_token(token: str | None, file: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> str | None:
    """Return the credential `token`, or else that in `file`, or else in HEADWATER_TOKEN; None without any."""
    if token is None and file is not None:
        try:
            token = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"the token file cannot be read: {type(error).__name__}", file=str(file)) from None
    if token is None:
        token = environ.get("HEADWATER_TOKEN") or None
    if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
        # Checked here because the errors of HTTP libraries repeat such a header.
        raise ConfigError("the token is not printable ASCII text", hint="Check it for line breaks.")
    return token


# --- requests --------------------------------------------------------------------------------------------


def rpc_request(method: str, params: Mapping[str, Any]) -> Request:
    """Return the request of an RPC method; parameters that are None are left out."""
    given = {name: value for name, value in params.items() if value is not None}
    body = msgspec.json.encode({"id": 1, "method": method, "params": given})
    repeat = RetryPolicy.ANY if method in REPEATABLE else RetryPolicy.REFUSED
    if "tx" in given or "tx_id" in given:
        repeat = RetryPolicy.UNSENT
    waits = given.get("wait_ms", 0) / 1000
    return Request("POST", RPC, {"content-type": "application/json"}, body, repeat, waits)


def get_request(parts: Sequence[str], query: Mapping[str, Any], accept: str, last_id: str = "") -> Request:
    """Return the GET request for /api/v1/<parts>; parameters that are None are left out."""
    path = "/".join(["/api/v1", *(quote(part, safe="", errors="surrogateescape") for part in parts)])
    text = urlencode({name: _text(name, value) for name, value in query.items() if value is not None})
    headers = {"accept": accept} | ({"last-event-id": last_id} if last_id else {})
    return Request("GET", f"{path}?{text}" if text else path, headers)


def _text(name: str, value: Any) -> str:
    """Return a parameter of a query string: JSON where RPC takes JSON; lists of names have commas."""
    if name in ("pk", "pk_range", "spans"):
        return msgspec.json.encode(value).decode()
    if name == "shard" and isinstance(value, Mapping):
        return f"{value['index']}/{value['of']}"
    if name == "include" and isinstance(value, Mapping):
        return ",".join(image for image, wanted in value.items() if wanted)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        plain = all("," not in word and word == word.strip() and word[:1] != "[" for word in value)
        return ",".join(value) if plain else msgspec.json.encode(value).decode()
    return str(value)


# --- answers ---------------------------------------------------------------------------------------------


def rpc_result(status: int, headers: Mapping[str, str], body: bytes) -> Any:
    """Return the result in the envelope; raise the error in it."""
    answer = _object(body)
    if answer is None or not isinstance(answer.get("ok"), bool):
        raise refusal(status, headers, body)
    if answer["ok"]:
        return answer["result"]
    error = answer.get("error") or {}
    raise _with_wait(error_of(error.get("code"), error.get("message"), error.get("details") or {}), headers)


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> HeadwaterError:
    """Return the error of an unsuccessful response: as its problem+json says, or by its status if a proxy answered."""
    found = _object(body) or {}
    if "code" in found:
        details = {name: value for name, value in found.items() if name not in ("type", "title", "status", "code")}
        return _with_wait(error_of(found["code"], found.get("title"), details), headers)
    if status >= 500 or status == 429:
        return _with_wait(
            Unavailable(f"the answer was {status}", hint="A proxy may stand between.", sent=True), headers
        )
    kind = {401: Unauthorized, 403: Forbidden, 404: NotFound}.get(status, InvalidRequest)
    return kind(f"the answer was {status}, not one of a Headwater server", hint="Check the URL.")


def error_of(code: Any, message: Any, details: Mapping[str, Any]) -> HeadwaterError:
    """Return the error of headwater.errors with this code; `extra` holds the details."""
    kind = CLASSES.get(code, HeadwaterError)
    error = kind.__new__(kind)
    HeadwaterError.__init__(error, str(message or "the server refused"), hint=str(details.get("hint") or ""))
    error.extra = {name: value for name, value in details.items() if name not in ("hint", "retryable")}
    if code not in CLASSES:  # the server is newer
        error.extra |= {"code": code, "retryable": bool(details.get("retryable"))}
    if isinstance(error, OffsetExpired):
        place = error.extra.get
        error.horizon, error.latest = place("earliest_offset", 0), place("latest_offset", 0)
        error.after = place("after", place("resnapshot_from_offset", error.horizon - 1))
    return error


def offset_expired(body: Mapping[str, Any]) -> HeadwaterError:
    """Return the error for a reader that must resnapshot, from a page of a poll or a `resnapshot` of a stream."""
    reason = body.get("resnapshot_reason", body.get("reason"))
    kept = ("earliest_offset", "latest_offset", "resnapshot_from_offset", "snapshot_url", "snapshot_urls")
    details = {name: body[name] for name in kept if name in body}
    return error_of(
        OffsetExpired.code, f"the log evicted the next changes: {reason}", {**details, "resnapshot_reason": reason}
    )


def reader(kind: type[T]) -> Callable[[Any], T]:
    """Return a function that converts the result of a call to `kind`, or raises HeadwaterError."""

    def read(found: Any) -> T:
        try:
            return msgspec.convert(found, kind)
        except msgspec.ValidationError as error:
            hint = "Is the server of another version?"
            raise HeadwaterError(f"the answer cannot be read: {error}", hint=hint) from None

    return read


def ranges_of(found: Any) -> list[Range]:
    """Return the ranges of an answer, in key order."""
    return sorted((one.read() for one in reader(list[WireRange])(found)), key=lambda range: range.span.start)


def unreachable(server: Server, error: Exception, *, sent: bool) -> HeadwaterError:
    """Return the error for a missing answer; it is retryable unless the server speaks no TLS."""
    if "WRONG_VERSION_NUMBER" in str(error):
        plain = server.url.replace("https", "http", 1)
        return ConfigError(f"{server.url} does not speak TLS", hint=f"Write {plain}.")
    what = "no server answers" if not sent else "the connection broke before the answer"
    message = f"{what} at {server.url}: {str(error) or type(error).__name__}"
    if server.scheme == "https" or not (sent or "reset" in message):
        return Unavailable(message, sent=sent)
    secure = server.url.replace("http", "https", 1)
    return Unavailable(message, hint=f"It may have stopped; or it speaks TLS: then write {secure}.", sent=sent)


def distrusted(server: Server, error: Exception) -> HeadwaterError:
    """Return the error for a certificate that cannot be verified; it is not retryable."""
    reason = getattr(error, "verify_message", "") or type(error).__name__
    return ConfigError(
        f"the certificate of {server.url} is not trusted: {reason}",
        hint="Name the file of its authority with SSL_CERT_FILE, or pass `tls`.",
    )


def broken(reason: object = "") -> HeadwaterError:
    """Return the error for a truncated body."""
    return Unavailable(f"the answer broke off before its end{f': {reason}' if str(reason) else ''}", sent=True)


def may_repeat(repeat: RetryPolicy, error: HeadwaterError) -> bool:
    """Return whether a request that failed with `error` may be sent again."""
    sent = error.extra.get("sent")
    if sent is not None:  # no Headwater server answered
        return repeat is RetryPolicy.ANY or not sent
    return bool(error.retryable or error.extra.get("retryable")) and repeat is not RetryPolicy.UNSENT


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _with_wait(error: HeadwaterError, headers: Mapping[str, str]) -> HeadwaterError:
    text = headers.get("retry-after") or ""
    if text.isascii() and text.isdigit():
        error.extra["retry_after"] = int(text)
    return error
