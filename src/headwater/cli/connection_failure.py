"""Failures to reach a server, with a hint: no listener, an untrusted certificate, TLS on one side only."""

from __future__ import annotations

import http.client
import socket
import ssl
from urllib.parse import urlsplit

from headwater.cli.failure import UNREACHABLE, Failure
from headwater.errors import HeadwaterError

PROBE_SECONDS = 5.0
OTHER_NAME = (62, 64)  # OpenSSL: the certificate is for another host name, or another address
OUT_OF_TIME = (9, 10)  # OpenSSL: not yet valid, expired


def transport_error(error: HeadwaterError) -> Exception:
    """Return the error of the socket or of HTTP for which the client raised `error`."""
    return error.__context__ if isinstance(error.__context__, Exception) else error


def unreachable(url: str, error: Exception) -> Failure:
    """Return the failure of the first request to `url`; may connect once more, to find out whether TLS is spoken."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _untrusted(url, error)
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return _other_scheme(url, "does not speak TLS", "http")
    if isinstance(error, ssl.SSLError):
        hint = "The server's settings of TLS say whom it lets in (serve.tls_http_clients)."
        return Failure(f"TLS with {url} failed: {error.reason or reason(error)}", hint=hint, exit_code=UNREACHABLE)
    if url.startswith("http:") and isinstance(error, (http.client.HTTPException, ConnectionError)) and _speaks_tls(url):
        return _other_scheme(url, "speaks TLS", "https")
    return no_answer(url, error)


def no_answer(url: str, error: Exception) -> Failure:
    """Return the failure for a server that does not answer, with `error` as the reason."""
    hint = "Start one with `headwater serve`, or name another with --server."
    return Failure(f"no server answers at {url}: {reason(error)}", hint=hint, exit_code=UNREACHABLE)


def reason(error: Exception) -> str:
    """Return the system's text for `error`, else its message, else the name of its class."""
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _untrusted(url: str, error: ssl.SSLCertVerificationError) -> Failure:
    hint = "Name the authority that vouches for it with --ca FILE or HEADWATER_CA."
    if error.verify_code in OTHER_NAME:
        hint = "Name the server with --server as its certificate does."
    elif error.verify_code in OUT_OF_TIME:
        hint = "The server needs a new certificate, or a clock is wrong."
    said = error.verify_message.rstrip(".")
    return Failure(f"the certificate of {url} is not trusted: {said}", hint=hint, exit_code=UNREACHABLE)


def _other_scheme(url: str, what: str, scheme: str) -> Failure:
    address = urlsplit(url).netloc
    return Failure(f"{address} {what}", hint=f"Use --server {scheme}://{address}.", exit_code=UNREACHABLE)


def _speaks_tls(url: str) -> bool:
    """Return whether the server completes a TLS handshake; no data is sent, so the certificate need not be trusted."""
    parts = urlsplit(url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((parts.hostname or "", parts.port or 80), PROBE_SECONDS) as plain,
            context.wrap_socket(plain),
        ):
            return True
    except OSError:  # ssl.SSLError is one
        return False
