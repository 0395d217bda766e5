"""Events of a running pipeline for a display. One thread per table makes the calls; none may raise or take long."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.errors import HeadwaterError
    from headwater.pipeline.run.table_report import TableReport
    from headwater.pipeline.run.task import RangeProgress, Task


class Watcher:
    """A receiver of the events of a running pipeline; a method that is not overridden ignores its event."""

    def started(self, task: Task, reason: str, rows: int, ranges: int) -> None:
        """Report that a snapshot begins because of `reason`, with the estimated rows and the number of ranges."""

    def range_moved(self, task: Task, row: RangeProgress) -> None:
        """Report the progress of one range, also if it is unchanged."""

    def loaded(self, task: Task, parts: int, rows: int, seconds: float) -> None:
        """Report that spans of the snapshot were committed."""

    def stage(self, task: Task, stage: str) -> None:
        """Report the stage that the table as a whole has reached."""

    def stepped(self, task: Task, upto: int, changes: int, seconds: float) -> None:
        """Report that `changes` changes, up to offset `upto`, were committed."""

    def live(self, task: Task, offset: int, latest: int) -> None:
        """Report that the sink is at `offset` and the log at `latest`; if they are equal nothing is left to do."""

    def measured(self, task: Task, offset: int, latest: int) -> None:
        """Report offsets as `live` does, before each action, unless a part of the snapshot is missing."""

    def retrying(self, task: Task, error: HeadwaterError, failures: int) -> None:
        """Report a failure that is retried; `failures` counts the failures in a row."""

    def failed(self, task: Task, error: HeadwaterError) -> None:
        """Report that the table failed with `error`, and is carried no further."""

    def done(self, task: Task, offset: int, rows: int) -> None:
        """Report the end of a run, stopped or caught up, with the sink at `offset` after `rows` rows and changes."""

    def verified(self, task: Task, report: TableReport) -> None:
        """Report that source and sink were compared."""


class Watchers(Watcher):
    """Several watchers as one: each receives every event."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers


def _to_each(name: str) -> Callable[..., None]:
    def event(self: Watchers, *facts: Any) -> None:
        for watcher in self._watchers:
            getattr(watcher, name)(*facts)

    return event


for _name in [name for name in vars(Watcher) if not name.startswith("_")]:
    setattr(Watchers, _name, _to_each(_name))
