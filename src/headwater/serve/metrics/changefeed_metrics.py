"""Prometheus metrics of change feeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headwater.ranges.changefeed.catch_up_limits import CatchUpLimits


@dataclass
class ChangefeedCounters:
    """Counters of a server's change feeds."""

    open: int = 0
    events: int = 0
    checkpoints: int = 0
    slow: int = 0
    catchups: CatchUpLimits | None = None  # None before the first feed


CHANGEFEED_METRICS: dict[str, tuple[str, Callable[[ChangefeedCounters], float]]] = {  # name -> help, number
    "headwater_changefeeds": ("Open change feeds.", lambda n: n.open),
    "headwater_changefeed_events_total": ("Events sent on change feeds, checkpoints included.", lambda n: n.events),
    "headwater_changefeed_checkpoints_total": ("Checkpoints sent on change feeds.", lambda n: n.checkpoints),
    "headwater_changefeed_catchups": (
        "Change feeds that read their backlog.",
        lambda n: n.catchups.running if n.catchups else 0,
    ),
    "headwater_changefeed_catchups_waiting": (
        "Change feeds that wait to read their backlog.",
        lambda n: n.catchups.waiting if n.catchups else 0,
    ),
    "headwater_changefeed_slow_consumers_total": (
        "Change feeds ended because their reader was slow.",
        lambda n: n.slow,
    ),
}
