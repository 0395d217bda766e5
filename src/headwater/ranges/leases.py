"""What registering a pull takes: a name, an offset at which all is durable, and leases that outlive a restart."""

from __future__ import annotations

from contextlib import suppress

from headwater.errors import InvalidRequest, OffsetExpired, Unavailable
from headwater.log.live import LiveLog
from headwater.ranges.database import Database
from headwater.ranges.store import Store

REGISTER_SECONDS = 10.0  # longest a registration waits for what was committed before it, which it must have
ATTEMPTS = 5  # against those who change the same at the same time


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


def check_subscriber(name: str) -> None:
    """InvalidRequest unless it is fit to be kept."""
    if not 1 <= len(name) <= 200 or not name.isprintable():
        raise InvalidRequest(
            "`subscriber` is not a name", hint="Use 1 to 200 printable characters that tell who pulls, and what for."
        )
