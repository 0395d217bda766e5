"""Prometheus metrics of change feeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headwater.ranges.changefeed.catch_up_limits import CatchUpLimits

CHANGEFEED_METRICS: dict[str, tuple[str, str, tuple[str, ...]]] = {  # name -> kind, help, labels
    "headwater_changefeeds": ("gauge", "Open change feeds.", ()),
    "headwater_changefeed_events_total": ("counter", "Events sent on change feeds, checkpoints included.", ()),
    "headwater_changefeed_checkpoints_total": ("counter", "Checkpoints sent on change feeds.", ()),
    "headwater_changefeed_catchups": ("gauge", "Change feeds that read their backlog.", ()),
    "headwater_changefeed_catchups_waiting": ("gauge", "Change feeds that wait to read their backlog.", ()),
    "headwater_changefeed_slow_consumers_total": ("counter", "Change feeds ended because their reader was slow.", ()),
}


@dataclass
class ChangefeedCounters:
    """Counters of a server's change feeds."""

    open: int = 0
    events: int = 0
    checkpoints: int = 0
    slow: int = 0
    catchups: CatchUpLimits | None = None  # None before the first feed


CHANGEFED: dict[str, Callable[[ChangefeedCounters], float]] = {
    "headwater_changefeeds": lambda numbers: numbers.open,
    "headwater_changefeed_events_total": lambda numbers: numbers.events,
    "headwater_changefeed_checkpoints_total": lambda numbers: numbers.checkpoints,
    "headwater_changefeed_catchups": lambda numbers: numbers.catchups.running if numbers.catchups else 0,
    "headwater_changefeed_catchups_waiting": lambda numbers: numbers.catchups.waiting if numbers.catchups else 0,
    "headwater_changefeed_slow_consumers_total": lambda numbers: numbers.slow,
}
