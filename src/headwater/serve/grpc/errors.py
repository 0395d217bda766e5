"""Status, text and trailers of an error for gRPC clients.

The texts of authentication errors are SochDB's, word for word: its clients compare them.
"""

from __future__ import annotations

from typing import Any

import grpc

from headwater.errors import Forbidden, HeadwaterError, LimitExceeded, Unauthorized
from headwater.model.principal import EDITOR, OWNER, VIEWER

CAPABILITY = {VIEWER: "Read", EDITOR: "Write", OWNER: "Admin"}
MAX_NAME = 200  # characters of a namespace in an error
Metadata = tuple[tuple[str, str], ...]


def status(error: HeadwaterError) -> grpc.StatusCode:
    """Return the gRPC status of an error."""
    return grpc.StatusCode[error.grpc_status]


def text(error: HeadwaterError) -> str:
    """Return the message, in SochDB's words if SochDB has one for this error."""
    if isinstance(error, Unauthorized):
        if error.extra.get("expired"):
            return "Authentication token has expired."
        return "Authentication required. Provide a Bearer token or API key."
    if isinstance(error, Forbidden) and "role" in error.extra:
        return f"Insufficient permissions. Required capability: {CAPABILITY[error.extra['role']]}"
    if isinstance(error, Forbidden) and "database" in error.extra:
        found = error.extra
        return f"Access denied to namespace '{found['database'][:MAX_NAME]}' for tenant '{found['principal']}'"
    if isinstance(error, LimitExceeded) and "retry_after_ms" in error.extra:
        return f"Rate limit exceeded. Retry after {error.extra['retry_after_ms']}ms."
    return error.message


def trailers(error: HeadwaterError) -> Metadata:
    """Return the trailers: code, hint, and the details that a program may use."""
    found: dict[str, Any] = {"headwater-code": error.code}
    if error.hint:
        found["headwater-hint"] = error.hint
    if "retry_after_ms" in error.extra:
        found["retry-after-ms"] = found["grpc-retry-pushback-ms"] = error.extra["retry_after_ms"]
    if "earliest_offset" in error.extra:
        found["oldest-available"] = error.extra["earliest_offset"]
    for name in ("reason", "threshold", "checkpoint"):  # of change feeds
        if name in error.extra:
            found[f"changefeed-{name}"] = error.extra[name]
    return tuple((name, _ascii(value)) for name, value in found.items())


def _ascii(value: Any) -> str:
    """Return `value` as printable ASCII, as trailers require; other characters are escaped."""
    return "".join(
        sign if " " <= sign <= "~" else sign.encode("unicode_escape", "surrogatepass").decode() for sign in str(value)
    )
