"""The start position of a feed: a cursor from a keyword, an offset or a time."""

from __future__ import annotations

from collections.abc import Callable

from headwater.errors import InvalidRequest, OffsetExpired, Unavailable
from headwater.feeds.subscriptions.subscribe_table import EARLIEST, OFFSET, TS, Start
from headwater.log.live.live_log import LiveLog
from headwater.model.clock import ts_ms, ts_text, wall_ms

SKEW_MS = 60_000  # how far the clock of a client may be ahead of the server's clock


def cursor_of(log: LiveLog, start: Start, *, whole: bool) -> int:
    """Return the offset after which a feed begins; with `whole`, the feed begins with a whole transaction.

    Raises InvalidRequest for a start beyond the head, OffsetExpired if changes after the start may be evicted.
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
    """Raise InvalidRequest for a cursor beyond the log, Unavailable if the log has not caught up yet.

    After a crash a reader may be ahead of the log for a moment, because it received staged changes.
    """
    if cursor <= log.latest:
        return
    if not caught_up:
        raise Unavailable(f"the log has not reached offset {cursor} yet", hint="Retry in a moment.")
    raise InvalidRequest(
        f"{field} {cursor} is beyond the latest offset {log.latest}",
        hint="Send the last offset that you received from this server.",
    )


def check_cursor(log: LiveLog, cursor: int, field: str) -> int:
    """Return `cursor` if a feed can continue after it; raise InvalidRequest or OffsetExpired otherwise."""
    if cursor > log.latest:
        raise InvalidRequest(
            f"{field} {cursor} is beyond the latest offset {log.latest}",
            hint=f"Send an offset that you received from this server, or leave out {field} to begin now.",
        )
    if cursor + 1 < log.horizon:
        raise OffsetExpired(cursor, log.horizon, log.latest)
    return cursor


def at_time(log: LiveLog, ts: int, field: str = "ts", *, now_ms: Callable[[], int] = wall_ms) -> int:
    """Return the last offset at or before `ts`; raise OffsetExpired if the changes of that time may be evicted.

    Raises InvalidRequest for a future time: later commits before that time would be delivered although they must not.
    """
    if ts_ms(ts) > now_ms() + SKEW_MS and ts > log.clock_ceiling:
        raise InvalidRequest(
            f"{field} {ts_text(ts)} is in the future",
            hint=f'Times are milliseconds since 1970; leave out {field}, or send "latest", to begin now.',
        )
    found = log.offset_at(ts)
    dropped = log.horizon > log.generation_first
    if dropped and found == log.horizon - 1:
        kept = log.read(after=log.horizon - 1, limit=1)
        # In an empty log, only a time that no change has reached is certainly after all evicted changes.
        if ts < (kept[0].ts if kept else log.clock_ceiling):
            raise OffsetExpired(found - 1, log.horizon, log.latest)
    return found
