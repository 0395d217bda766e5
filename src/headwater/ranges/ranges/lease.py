"""Registration of pulls: checks of names and limits, the durable offset, and leases that survive a restart."""

from __future__ import annotations

from contextlib import suppress

from headwater.database import Database
from headwater.errors import Conflict, InvalidRequest, LimitExceeded, OffsetExpired, Unavailable
from headwater.log.live.live_log import LiveLog
from headwater.model.principal import OWNER, Principal
from headwater.ranges.ranges.store import OtherLeases, Pull, Store

REGISTER_SECONDS = 10.0  # longest wait of a registration until the log has the commits from before it
ATTEMPTS = 5  # retries after concurrent changes
MOST_LEASES = 10_000
MOST_LEASES_PER_PRINCIPAL = 1_000  # of a principal that is not an owner, so that others have room


def restore_leases(store: Store, db: str, log: LiveLog, *, max_bytes: int) -> None:
    """Restore the leases of registered pulls in the log; call it before the log is trimmed."""
    for pull in store.leases(db):
        if pull.generation == log.generation:
            with suppress(OffsetExpired):
                log.hold(pull.name, pull.kept, until_ms=pull.until_ms, max_bytes=max_bytes, again=True)


def durable_now(database: Database) -> tuple[str, int]:
    """Return the generation, and an offset in it up to which everything committed before this call is durable."""
    log = database.log
    if not database.catch_up(REGISTER_SECONDS):
        raise Unavailable(f"the log is more than {REGISTER_SECONDS:.0f} s behind the database", hint="Retry.")
    for _ in range(ATTEMPTS):
        generation, version = log.generation, log.flush()
        if generation == log.generation:
            return generation, version
    raise Unavailable("the log is starting a new generation", hint="Retry.")


def may_change(who: Principal, owner: str) -> bool:
    """Return whether `who` may renew, replace and release a lease that `owner` registered."""
    return who.role == OWNER or owner in ("", who.name)


def check_lease(who: Principal, pull: Pull, others: OtherLeases) -> None:
    """Raise Conflict if another principal uses the name of a new lease, LimitExceeded if there is no room for it."""
    if not all(may_change(who, owner) for owner in others.holders):
        raise Conflict(
            f"the subscriber {pull.subscriber!r} is registered on {pull.table!r} by another caller",
            hint="Choose another name, or let that caller or an owner release it.",
        )
    if others.total >= MOST_LEASES:
        raise LimitExceeded(f"{MOST_LEASES} tables and ranges are registered", hint="Release some.")
    if who.role != OWNER and others.of_owner >= MOST_LEASES_PER_PRINCIPAL:
        raise LimitExceeded(
            f"{who.name!r} has registered {others.of_owner} tables and ranges, the share of one caller",
            hint="Release some with pull.release, or register a whole table instead of its ranges.",
        )


def check_subscriber(name: str) -> None:
    """Raise InvalidRequest unless `name` is printable and 1 to 200 characters long."""
    if not 1 <= len(name) <= 200 or not name.isprintable():
        raise InvalidRequest(
            "`subscriber` is not a valid name",
            hint="Use 1 to 200 printable characters that name the reader and its purpose.",
        )
