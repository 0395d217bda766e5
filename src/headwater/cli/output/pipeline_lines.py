"""Output of a running pipeline without a terminal: plain lines, or a JSON object per line."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from headwater.cli.output.pipeline_progress import TableProgress
from headwater.cli.output.tables import printable
from headwater.model.quantity import amount, counted
from headwater.pipeline.run.events import Watcher

if TYPE_CHECKING:
    from headwater.errors import HeadwaterError
    from headwater.pipeline.run.table_report import Difference, TableReport
    from headwater.pipeline.run.task import RangeProgress, Task

INTERVAL_SECONDS = 5.0
Key = tuple[str, str, str]  # of a task
REASONS = {"first": "the first snapshot"}


class ProgressDisplay(Watcher):
    """A watcher that keeps a tally per table. Subclasses have `shown` and `say`, which are called under a lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # each table reports from its own thread
        self._tallies: dict[Key, TableProgress] = {}

    def shown(self, task: Task, tally: TableProgress, *, now: bool = False) -> None:
        """Show a changed tally; with `now`, at once."""

    def say(self, task: Task | None, text: str, *, error: bool = False) -> None:
        """Print a line."""

    def started(self, task: Task, reason: str, rows: int, ranges: int) -> None:
        with self._lock:
            self._tally(task).began(rows)
            why = REASONS.get(reason, f"a new snapshot ({reason})")
            self.say(task, f"{why}, about {counted(rows, 'row')} in {counted(ranges, 'range')}")

    def range_moved(self, task: Task, row: RangeProgress) -> None:
        with self._lock:
            if self._tally(task).moved(row):
                self.shown(task, self._tally(task))

    def loaded(self, task: Task, parts: int, rows: int, seconds: float) -> None:
        with self._lock:  # shown by `range_moved`, which follows for each of the parts
            self._tally(task).loaded(rows, seconds)

    def stage(self, task: Task, stage: str) -> None:
        with self._lock:
            self._tally(task).stage = stage
            self.shown(task, self._tally(task), now=True)

    def stepped(self, task: Task, upto: int, changes: int, seconds: float) -> None:
        with self._lock:
            self._tally(task).stepped(upto, changes, seconds)
            self.shown(task, self._tally(task))

    def live(self, task: Task, offset: int, latest: int) -> None:
        with self._lock:
            tally = self._tally(task)
            tally.offset, tally.latest = offset, latest
            self.shown(task, tally)

    def retrying(self, task: Task, error: HeadwaterError, failures: int) -> None:
        with self._lock:
            hint = f"\nhint: {error.hint}" if error.hint and failures == 1 else ""
            self.say(
                task, f"tries again: {error.message} ({error.code}, {counted(failures, 'failure')} in a row){hint}"
            )

    def failed(self, task: Task, error: HeadwaterError) -> None:
        with self._lock:
            self._tally(task).stage = "failed"
            hint = f"\nhint: {error.hint}" if error.hint else ""
            self.say(task, f"{error.message} ({error.code}){hint}", error=True)

    def done(self, task: Task, offset: int, rows: int) -> None:
        with self._lock:
            self.say(task, f"is at offset {amount(offset)} after {amount(rows)} rows and changes of this run")

    def verified(self, task: Task, report: TableReport) -> None:
        with self._lock:
            self.say(task, compared(report), error=not report.is_good)

    def _tally(self, task: Task) -> TableProgress:
        return self._tallies.setdefault(task.key, TableProgress(task))


def compared(report: TableReport) -> str:
    """Return the result of comparing a table with its sink, as text of one or more lines."""
    if report.error is not None:
        return f"could not be compared: {report.error.message} ({report.error.code})"
    what = f"{counted(report.rows, 'row')} in {counted(len(report.ranges), 'range')} at offset {amount(report.offset)}"
    if not report.bad:
        return f"source and sink are equal: {what}"
    found = [each.difference for each in report.bad if each.difference is not None]
    bad = "\n".join([f"{counted(len(report.bad), 'range')} differed: {what}", *map(_differing, found)])
    if not report.is_good:
        return f"{bad}\nhint: `headwater pipeline verify --repair` repairs them."
    rows = sum(each.rows for each in found)
    repaired = counted(rows, "row") if len(found) == len(report.bad) else counted(report.repaired, "range")
    return f"{bad}\nrepaired: {repaired}"


def _differing(found: Difference) -> str:
    """Return the differences of a range in a line."""
    counts = {"missing": found.missing, "extra": found.extra, "different": found.different}
    differences = ", ".join(f"{amount(count)} {name}" for name, count in counts.items() if count)
    return f"  rows: {differences} in the sink; keys like {' | '.join(found.examples)}"


class ProgressLines(ProgressDisplay):
    """Plain lines: events at once, progress every few seconds. Errors on standard error."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._last: dict[Key, tuple[float, str]] = {}

    def shown(self, task: Task, tally: TableProgress, *, now: bool = False) -> None:
        at, text = self._last.get(task.key, (float("-inf"), ""))
        line = f"{tally.stage}: {tally.words}" if tally.words != tally.stage else tally.stage
        if line != text and (now or self._clock() >= at + INTERVAL_SECONDS):
            self._last[task.key] = (self._clock(), line)
            self.say(task, line)

    def say(self, task: Task | None, text: str, *, error: bool = False) -> None:
        first, *rest = text.split("\n")
        named = first if task is None else f"{task.db}.{task.table}: {first}"
        out: TextIO = sys.stderr if error else sys.stdout
        print("\n".join([("error: " if error else "") + printable(named), *map(printable, rest)]), file=out, flush=True)


class JsonLines(Watcher):
    """One JSON object per line, with the event in `what`. Unchanged progress is not printed again."""

    def __init__(self, clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._clock_ms = clock_ms
        self._lock = threading.Lock()
        self._last: dict[tuple[Any, ...], dict[str, Any]] = {}

    def emit(self, what: str, task: Task | None, **facts: Any) -> None:
        """Print one object."""
        subject = {} if task is None else {"pipeline": task.name, "db": task.db, "table": task.table}
        with self._lock:
            line = {"what": what, "ts_ms": self._clock_ms(), **subject, **facts}
            print(json.dumps(line, ensure_ascii=False), flush=True)

    def say(self, task: Task | None, text: str) -> None:
        """Print a plain line as an object."""
        self.emit("note", task, text=text)

    def started(self, task: Task, reason: str, rows: int, ranges: int) -> None:
        self.emit("started", task, reason=reason, rows_estimate=rows, ranges=ranges)

    def range_moved(self, task: Task, row: RangeProgress) -> None:
        self._news("range", task, row.range_id, described(row))

    def loaded(self, task: Task, parts: int, rows: int, seconds: float) -> None:
        self.emit("loaded", task, parts=parts, rows=rows, seconds=round(seconds, 3))

    def stage(self, task: Task, stage: str) -> None:
        self.emit("stage", task, stage=stage)

    def stepped(self, task: Task, upto: int, changes: int, seconds: float) -> None:
        self.emit("stepped", task, offset=upto, changes=changes, seconds=round(seconds, 3))

    def live(self, task: Task, offset: int, latest: int) -> None:
        self._news("live", task, None, {"offset": offset, "latest": latest, "lag": max(0, latest - offset)})

    def retrying(self, task: Task, error: HeadwaterError, failures: int) -> None:
        self.emit("retrying", task, failures=failures, error=error_json(error))

    def failed(self, task: Task, error: HeadwaterError) -> None:
        self.emit("failed", task, error=error_json(error))

    def done(self, task: Task, offset: int, rows: int) -> None:
        self.emit("done", task, offset=offset, rows=rows)

    def verified(self, task: Task, report: TableReport) -> None:
        error = None if report.error is None else error_json(report.error)
        facts = {"equal": report.is_good, "offset": report.offset, "rows": report.rows, "ranges": len(report.ranges)}
        found = [each.difference for each in report.bad if each.difference is not None]
        facts |= {name: sum(getattr(each, name) for each in found) for name in ("missing", "extra", "different")}
        examples = [key for each in found for key in each.examples]
        self.emit(
            "verified", task, **facts, examples=examples, bad=len(report.bad), repaired=report.repaired, error=error
        )

    def _news(self, what: str, task: Task, which: Any, facts: dict[str, Any]) -> None:
        known = (what, task.key, which)
        if self._last.get(known) != facts:
            self._last[known] = facts
            self.emit(what, task, **facts)


def error_json(error: HeadwaterError) -> dict[str, str]:
    """Return an error as JSON."""
    return {"code": error.code, "message": error.message, "hint": error.hint}


def described(row: RangeProgress) -> dict[str, Any]:
    """Return a range as JSON: keys in hexadecimal."""
    return {
        "range": row.range_id,
        "epoch": row.epoch,
        "start": row.span.start.hex(),
        "end": None if row.span.end is None else row.span.end.hex(),
        "stage": row.stage,
        "init_version": row.init_version,
        "version": row.version,
        "last_key": row.last_key.hex(),
        "offset": row.last_offset,
        "rows": row.rows,
        "rows_estimate": row.rows_estimate,
        "reason": row.reason,
    }
