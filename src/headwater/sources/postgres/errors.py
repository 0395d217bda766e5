"""Translation of PostgreSQL's errors into ours, by SQLSTATE, never by text: psycopg's errors stay in this package."""

from __future__ import annotations

import logging
import re
import threading
import time

from psycopg import pq

from headwater.errors import (
    Busy,
    DuplicateKey,
    Forbidden,
    HeadwaterError,
    InvalidRequest,
    NotFound,
    NotSupported,
    SourceError,
    StorageFull,
    Unavailable,
)
from headwater.model.work.log_throttle import LogThrottle, counted

SERIALIZATION, DEADLOCK, LOCK_TIMEOUT, CANCELED = "40001", "40P01", "55P03", "57014"
DENIED = "42501"
MAX_TEXT = 1_000  # characters of each PostgreSQL text in our errors, at most
RETRIED = frozenset({SERIALIZATION, DEADLOCK})  # a retry may succeed

# SQLSTATE classes without names of others' objects: caller's values, server resources, limits, operator intervention.
# `_ADDRESS` matches the start of libpq's messages: callers must not learn the address.
_NAMELESS = frozenset({"22", "53", "54", "57"})
# Lines of the context of an error in the caller's own values. Errors in a function have further lines.
_OWN_INPUT = re.compile(r"JSON data, line \d+: .*|(unnamed )?portal .*parameter \$\d+.*")
_ADDRESS = re.compile(r'connection to server (at|on) .*? failed|could not translate host name "[^"]*"')
_saying = threading.Lock()  # guards _repeats
_repeats = LogThrottle()
logger = logging.getLogger("headwater.postgres")
_CONSTRAINT = "The statement breaks a constraint of the table; nothing was kept."
_GRANT = "Grant the server's role what it needs in PostgreSQL; past row security that is ALTER ROLE … BYPASSRLS."
_CHECK = "Check the statement and its arguments."


def fault(state: str, text: str, hint: str = "") -> HeadwaterError:
    """Return our error for SQLSTATE `state`, with `text` as its message; `hint` replaces some default hints."""
    match state:
        case "23505" | "23P01":
            return DuplicateKey(text)
        case "40001" | "40P01" | "55P03" | "55006":
            return Busy(text)
        case "57014":
            return InvalidRequest(text, hint="The statement ran too long and was cancelled; nothing was written.")
        case "25006":
            return InvalidRequest(text, hint="The transaction is read-only; begin one without `read_only`.")
        case "42501":
            return Forbidden(text, hint=hint or _GRANT)
        case "42601" if "multiple commands" in text:
            return InvalidRequest("one statement at a time", hint="Send each alone, or use tx.begin and tx.commit.")
        case "42P01" | "3F000":
            found = InvalidRequest(text, hint=hint or _CHECK)
            found.missing_table = _named(text) if state == "42P01" else ""
            return found
        case "53100":
            return StorageFull(text)
        case "57P04" | "3D000":
            return NotFound(text)
        case "0A000":
            return NotSupported(text, hint=hint)
    return _by_class(state, text, hint)


def _named(text: str) -> str:
    """Return the quoted part of `text`: the name is quoted in every language."""
    parts = text.split('"')
    return parts[1] if len(parts) == 3 else ""


def _by_class(state: str, text: str, hint: str) -> HeadwaterError:
    match state[:2]:
        case "23" | "44" | "27":
            return InvalidRequest(text, hint=_CONSTRAINT)
        case "08" | "57" | "58" | "XX" | "F0":
            return SourceError(text, hint=hint or "PostgreSQL is not available; try again in a moment.")
        case "53":
            return Unavailable(text, hint=hint or "PostgreSQL is short of connections or memory.")
        case "28":
            return SourceError(text, hint="PostgreSQL refused the credentials of this server.")
    return InvalidRequest(text, hint=hint or _CHECK)


def from_result(result: pq.abc.PGresult) -> HeadwaterError:
    """Return our error for a failed statement; `state_of` returns its SQLSTATE."""
    of = pq.DiagnosticField
    fields = (of.SQLSTATE, of.MESSAGE_PRIMARY, of.MESSAGE_DETAIL, of.MESSAGE_HINT, of.CONTEXT)
    state, text, detail, hint, context = (_field(result, field) for field in fields)
    if not state:
        return connection_lost(_cut(result.error_message))
    found = fault(state, f"{text} ({detail})" if detail and state[:2] in ("23", "22") else text, hint)
    found.__dict__["sqlstate"] = state
    is_own = len(context) < MAX_TEXT and all(map(_OWN_INPUT.fullmatch, context.splitlines()))
    # Policies and rules leave no context: without one, the values may be those of other tables.
    found.__dict__["is_of_unknown_values"] = is_unknown = not context and state[:2] in ("22", "54")
    found.names_tables = is_unknown or not is_own or state[:2] not in _NAMELESS
    return found


def timed_out() -> HeadwaterError:
    """Return the error for a statement past its time limit, whether or not PostgreSQL has ended it."""
    found = fault(CANCELED, "canceling statement due to statement timeout")
    found.__dict__["sqlstate"] = CANCELED
    return found


def unreachable(error: Exception) -> HeadwaterError:
    """Log why no connection can be made, and return the error for callers, without the address."""
    text = " ".join(str(error).split())
    with _saying:
        left_out = _repeats.again(text, time.monotonic())
    if left_out is not None:
        logger.warning("%s", counted(text, left_out))
    reason = _ADDRESS.sub("the connection failed", text)[:MAX_TEXT]
    return SourceError(reason, hint="Try again in a moment. Operators: the log has the address.")


def connection_lost(text: str) -> HeadwaterError:
    """Return the error for a lost connection, without the address."""
    text = _ADDRESS.sub("the connection failed", " ".join(text.split()))
    return SourceError(f"the connection to PostgreSQL was lost: {text}", hint="The server reconnects; try again.")


def state_of(error: BaseException) -> str:
    """Return the SQLSTATE that an error was made from; "" if none."""
    return str(getattr(error, "sqlstate", ""))


def _field(result: pq.abc.PGresult, field: pq.DiagnosticField) -> str:
    found = result.error_field(field)
    return "" if found is None else _cut(found)


def _cut(text: bytes) -> str:
    """Return the text cut to MAX_TEXT: a statement can produce an error text of any size."""
    if len(text) > MAX_TEXT * 4:
        text = text[: MAX_TEXT * 4]
    found = text.decode("utf-8", "replace")
    return found if len(found) <= MAX_TEXT else found[: MAX_TEXT - 1] + "…"
