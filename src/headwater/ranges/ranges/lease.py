"""What registering a pull takes: a name, an offset at which all is durable, and leases that outlive a restart."""

from __future__ import annotations

from contextlib import suppress

from headwater.database import Database
from headwater.errors import Conflict, InvalidRequest, LimitExceeded, OffsetExpired, Unavailable
from headwater.log.live.live_log import LiveLog
from headwater.model.principal import OWNER, Principal
from headwater.ranges.ranges.store import Others, Pull, Store

REGISTER_SECONDS = 10.0  # longest a registration waits for what was committed before it, which it must have
ATTEMPTS = 5  # against those who change the same at the same time
MOST_LEASES = 10_000
MOST_LEASES_PER_PRINCIPAL = 1_000  # of one that is not an owner: nobody takes the places of all others


def hold_again(store: Store, db: str, log: LiveLog, *, max_bytes: int) -> None:
    """Before anything is trimmed: pulls that were registered go on holding what they need."""
    for pull in store.leases(db):
        if pull.generation == log.generation:
            with suppress(OffsetExpired):
                log.hold(pull.name, pull.kept, until_ms=pull.until_ms, max_bytes=max_bytes, again=True)


def durable_now(database: Database) -> tuple[str, int]:
    """The generation, and an offset in it at which everything committed before this call is durable."""
    log = database.log
    if not database.catch_up(REGISTER_SECONDS):
        raise Unavailable(f"the log is more than {REGISTER_SECONDS:.0f} s behind the database", hint="Try again.")
    for _ in range(ATTEMPTS):
        generation, version = log.generation, log.flush()
        if generation == log.generation:
            return generation, version
    raise Unavailable("the log begins anew at this moment", hint="Try again.")


def may_change(who: Principal, owner: str) -> bool:
    """Return whether `who` may renew, replace and release a lease that `owner` registered."""
    return who.role == OWNER or owner in ("", who.name)


def check_lease(who: Principal, pull: Pull, others: Others) -> None:
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
    """InvalidRequest unless it is fit to be kept."""
    if not 1 <= len(name) <= 200 or not name.isprintable():
        raise InvalidRequest(
            "`subscriber` is not a name", hint="Use 1 to 200 printable characters that tell who pulls, and what for."
        )
