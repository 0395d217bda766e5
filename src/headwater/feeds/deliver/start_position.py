"""Where a feed begins: from words, an offset or a time to a cursor."""

from __future__ import annotations

from collections.abc import Callable

from headwater.errors import InvalidRequest, OffsetExpired, Unavailable
from headwater.feeds.subscriptions.subscribe_table import EARLIEST, OFFSET, TS, Start
from headwater.log.live.live_log import LiveLog
from headwater.model.clock import ts_ms, ts_text, wall_ms

SKEW_MS = 60_000  # how far the clock of a client may be ahead of ours


def cursor_of(log: LiveLog, start: Start, *, whole: bool) -> int:
    """The offset after which a feed begins; `whole` readers begin with a whole transaction.

    InvalidRequest beyond the newest change, OffsetExpired where changes that belong to it may be gone.
    """
    if start.kind == OFFSET:
        return check_cursor(log, start.at, "start.offset")
    if start.kind == TS:
        return at_time(log, start.at, "start.ts")
    if start.kind == EARLIEST:
        horizon = log.horizon
        return (log.first_whole(horizon) if whole else horizon) - 1
    return log.latest


def check_reached(log: LiveLog, cursor: int, field: str, caught_up: bool) -> None:
    """Refuse a cursor beyond the log; one that the log may still reach is only too early.

    After a crash a reader may be ahead of the log for a moment: it was told straight from the database.
    """
    if cursor <= log.latest:
        return
    if not caught_up:
        raise Unavailable(f"the log has not come to offset {cursor} yet", hint="Try again in a moment.")
    raise InvalidRequest(
        f"{field} {cursor} lies beyond the latest offset {log.latest}",
        hint="Offsets are given out by this server; send the last one you received.",
    )


def check_cursor(log: LiveLog, cursor: int, field: str) -> int:
    """`cursor` if a feed can go on after it."""
    if cursor > log.latest:
        raise InvalidRequest(
            f"{field} {cursor} lies beyond the latest offset {log.latest}",
            hint="Offsets are given out by this server; leave it out to begin now.",
        )
    if cursor + 1 < log.horizon:
        raise OffsetExpired(cursor, log.horizon, log.latest)
    return cursor


def at_time(log: LiveLog, ts: int, field: str = "ts", *, now_ms: Callable[[], int] = wall_ms) -> int:
    """The last offset at or before `ts`; OffsetExpired where that is too long ago to tell.

    InvalidRequest in the future: changes still to come would be delivered although they lie before it.
    """
    if ts_ms(ts) > now_ms() + SKEW_MS and ts > log.clock_ceiling:
        raise InvalidRequest(
            f"{field} {ts_text(ts)} lies in the future",
            hint='Times are milliseconds since 1970; leave it out, or send "latest", to begin now.',
        )
    found = log.offset_at(ts)
    dropped = log.horizon > log.generation_first
    if dropped and found == log.horizon - 1:
        kept = log.read(after=log.horizon - 1, limit=1)
        # Where nothing is kept, only a time that no change has reached is sure to lie behind all of them.
        if ts < (kept[0].ts if kept else log.clock_ceiling):
            raise OffsetExpired(found - 1, log.horizon, log.latest)
    return found
