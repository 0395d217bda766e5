"""Metrics of a running pipeline, counted from the events of its `Watcher`, in Prometheus' text format."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from headwater import __version__
from headwater.errors import HeadwaterError
from headwater.pipeline.run.events import Watcher
from headwater.pipeline.run.table_report import TableReport
from headwater.pipeline.run.task import FAILED, Task

BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds
TABLE = ("pipeline", "db", "table")  # labels of each metric of a table

Sample = tuple[str, tuple[str, ...], float]  # suffix of the name, values of the labels after TABLE, value


class Histogram:
    """Durations, counted by size."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(BUCKETS, seconds)] += 1
        self._sum += seconds

    def samples(self) -> Iterator[Sample]:
        """Yield the cumulative buckets, the sum and the count."""
        total = 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self._counts, strict=True):
            total += count
            yield "_bucket", (bound,), total
        yield "_sum", (), self._sum
        yield "_count", (), total


class TableValues:
    """The values of one table; None is unknown."""

    def __init__(self) -> None:
        self.stage: str | None = None
        self.offset: int | None = None
        self.latest: int | None = None
        self.rows = self.changes = 0
        self.load, self.step = Histogram(), Histogram()
        self.snapshots: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.committed_at: float | None = None
        self.report: TableReport | None = None
        self.reported_at: float | None = None
        self._unreached: deque[tuple[int, float]] = deque()  # offset, and when this run first saw it in the log

    def began(self) -> None:
        """Forget the position: a snapshot empties the sink."""
        self.offset = self.latest = None
        self._unreached.clear()

    def measured(self, offset: int, latest: int, now: float) -> None:
        """Note that the sink is at `offset` and the log at `latest`."""
        if latest > (self._unreached[-1][0] if self._unreached else offset):
            self._unreached.append((latest, now))
        self.latest = latest
        self.reached(offset)

    def reached(self, offset: int) -> None:
        """Note that the sink is at `offset`."""
        self.offset = offset
        while self._unreached and self._unreached[0][0] <= offset:
            self._unreached.popleft()

    @property
    def lag_changes(self) -> int | None:
        """Return the number of changes in the log after the offset of the sink."""
        return None if self.offset is None or self.latest is None else max(0, self.latest - self.offset)

    def lag_seconds(self, now: float) -> float | None:
        """Return how long this run has known the oldest of these changes."""
        if self.lag_changes is None:
            return None
        return now - self._unreached[0][1] if self._unreached else 0.0


class TableMetric(NamedTuple):
    """One metric of a table: its samples are computed from the values of the table and the monotonic time."""

    kind: str
    help: str
    samples: Callable[[TableValues, float], Iterable[Sample]]
    labels: tuple[str, ...] = ()  # after those of TABLE


def _gauge(help: str, value: Callable[[TableValues, float], float | None]) -> TableMetric:
    def samples(table: TableValues, now: float) -> Iterator[Sample]:
        if (found := value(table, now)) is not None:
            yield "", (), found

    return TableMetric("gauge", help, samples)


def _counter(help: str, value: Callable[[TableValues], float]) -> TableMetric:
    return TableMetric("counter", help, lambda table, now: [("", (), value(table))])


def _counters(help: str, label: str, values: Callable[[TableValues], Counter[str]]) -> TableMetric:
    def samples(table: TableValues, now: float) -> Iterator[Sample]:
        return (("", (name,), count) for name, count in sorted(values(table).items()))

    return TableMetric("counter", help, samples, (label,))


TABLE_METRICS = {
    "headwater_pipeline_stage_info": TableMetric(
        "gauge",
        "Always 1; the stage of the table as a label: register, snapshot, log or failed.",
        lambda table, now: [] if table.stage is None else [("", (table.stage,), 1)],
        ("stage",),
    ),
    "headwater_pipeline_failed": _gauge("1 once the run gave the table up.", lambda t, now: t.stage == FAILED),
    "headwater_pipeline_offset": _gauge(
        "Offset of the log up to which the sink has every change of its table.", lambda t, now: t.offset
    ),
    "headwater_pipeline_lag_changes": _gauge(
        "Changes in the log that the sink has not passed, those of other tables included; 0 without one of its own.",
        lambda t, now: t.lag_changes,
    ),
    "headwater_pipeline_lag_seconds": _gauge(
        "Time since the run first saw the oldest change after the offset of the sink; 0 without one.",
        lambda t, now: t.lag_seconds(now),
    ),
    "headwater_pipeline_rows_total": _counter("Snapshot rows committed to the sink.", lambda t: t.rows),
    "headwater_pipeline_changes_total": _counter("Changes committed to the sink.", lambda t: t.changes),
    "headwater_pipeline_load_seconds": TableMetric(
        "histogram", "Time to read and commit a group of snapshot ranges.", lambda t, now: t.load.samples()
    ),
    "headwater_pipeline_step_seconds": TableMetric(
        "histogram", "Time to read and commit a step of changes.", lambda t, now: t.step.samples()
    ),
    "headwater_pipeline_last_commit_timestamp_seconds": _gauge(
        "Time of the last commit to the sink, in seconds since 1970.", lambda t, now: t.committed_at
    ),
    "headwater_pipeline_snapshots_total": _counters("Snapshots begun, by reason.", "reason", lambda t: t.snapshots),
    "headwater_pipeline_retries_total": _counters("Failures that were retried.", "code", lambda t: t.retries),
    "headwater_pipeline_verified": _gauge(
        "1 if source and sink were equal when last compared; 0 if they differed or could not be compared.",
        lambda t, now: None if t.report is None else t.report.is_good,
    ),
    "headwater_pipeline_verified_offset": _gauge(
        "Offset at which source and sink were last compared.",
        lambda t, now: None if t.report is None or t.report.error is not None else t.report.offset,
    ),
    "headwater_pipeline_verified_timestamp_seconds": _gauge(
        "Time of the last comparison of source and sink, in seconds since 1970.", lambda t, now: t.reported_at
    ),
}
METRICS: dict[str, tuple[str, str, tuple[str, ...]]] = {  # name -> kind, help, labels
    "headwater_pipeline_info": ("gauge", "Always 1; the version as a label.", ("pipeline", "version")),
    "headwater_pipeline_uptime_seconds": ("gauge", "Time since the run started.", ("pipeline",)),
    **{name: (each.kind, each.help, (*TABLE, *each.labels)) for name, each in TABLE_METRICS.items()},
}


class PipelineMetrics(Watcher):
    """The metrics of one run. Thread-safe: each table reports from its own thread."""

    def __init__(
        self, pipeline: str, *, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        self._pipeline, self._clock, self._now = pipeline, clock, now
        self._began = clock()
        self._lock = threading.Lock()
        self._tables: dict[tuple[str, str, str], TableValues] = {}

    def started(self, task: Task, reason: str, rows: int, ranges: int) -> None:
        with self._lock:
            self._table(task).began()
            self._table(task).snapshots[reason] += 1

    def loaded(self, task: Task, parts: int, rows: int, seconds: float) -> None:
        with self._lock:
            table = self._table(task)
            table.rows += rows
            table.load.observe(seconds)
            table.committed_at = self._now()

    def stage(self, task: Task, stage: str) -> None:
        with self._lock:
            self._table(task).stage = stage

    def stepped(self, task: Task, upto: int, changes: int, seconds: float) -> None:
        with self._lock:
            table = self._table(task)
            table.changes += changes
            table.step.observe(seconds)
            table.reached(upto)
            table.committed_at = self._now()

    def measured(self, task: Task, offset: int, latest: int) -> None:
        with self._lock:
            self._table(task).measured(offset, latest, self._clock())

    def live(self, task: Task, offset: int, latest: int) -> None:
        self.measured(task, offset, latest)

    def retrying(self, task: Task, error: HeadwaterError, failures: int) -> None:
        with self._lock:
            self._table(task).retries[error.code] += 1

    def failed(self, task: Task, error: HeadwaterError) -> None:
        with self._lock:
            self._table(task).stage = FAILED

    def verified(self, task: Task, report: TableReport) -> None:
        with self._lock:
            table = self._table(task)
            table.report, table.reported_at = report, self._now()

    def text(self) -> str:
        """Return all metrics in Prometheus' text format; unknown values are absent."""
        with self._lock:
            now = self._clock()
            found: dict[str, list[Sample]] = {
                "headwater_pipeline_info": [("", (self._pipeline, __version__), 1)],
                "headwater_pipeline_uptime_seconds": [("", (self._pipeline,), now - self._began)],
            }
            for name, metric in TABLE_METRICS.items():
                found[name] = [
                    (suffix, (*key, *labels), value)
                    for key, table in self._tables.items()
                    for suffix, labels, value in metric.samples(table, now)
                ]
        return "".join(_family(name, samples) for name, samples in found.items())

    def _table(self, task: Task) -> TableValues:
        return self._tables.setdefault(task.key, TableValues())


def _family(name: str, samples: Iterable[Sample]) -> str:
    kind, text, labels = METRICS[name]
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    for suffix, values, number in samples:
        names = (*labels, "le") if suffix == "_bucket" else labels
        pairs = ",".join(f'{label}="{_escaped(value)}"' for label, value in zip(names, values, strict=True))
        lines.append(f"{name}{suffix}{{{pairs}}} {float(number)!r}")
    return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
