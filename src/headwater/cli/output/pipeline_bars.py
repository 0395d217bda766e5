"""Progress bars of a running pipeline on a terminal: one per table and one per range that is read, then the lag."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from headwater.cli.output.pipeline_lines import Key, ProgressDisplay
from headwater.cli.output.pipeline_progress import TableProgress
from headwater.cli.output.tables import printable
from headwater.model.quantity import counted

if TYPE_CHECKING:
    from headwater.pipeline.run.task import RangeProgress, Task

MOST_RANGES = 4  # shown of one table


class ProgressBars(ProgressDisplay):
    """Bars drawn by rich while the context is open."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[words]}", markup=False),
            console=console or Console(highlight=False),
        )
        self._bars: dict[Key, TaskID] = {}
        self._range_bars: dict[Key, dict[int, TaskID]] = {}

    def __enter__(self) -> ProgressBars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for bars in self._range_bars.values():
                for bar in bars.values():
                    self._progress.remove_task(bar)
            self._range_bars.clear()
            self._progress.stop()

    def shown(self, task: Task, tally: TableProgress, *, now: bool = False) -> None:
        if task.key not in self._bars:
            self._bars[task.key] = self._progress.add_task(printable(tally.title), total=None, words="")
        loading = tally.stage in ("register", "snapshot")
        total = max(tally.total, 1)
        self._progress.update(
            self._bars[task.key],
            description=f"{printable(tally.title)} {tally.stage}",
            total=total,
            completed=tally.rows if loading else total,
            words=tally.words,
        )
        self._show_ranges(task, tally.active(MOST_RANGES) if loading else [])

    def say(self, task: Task | None, text: str, *, error: bool = False) -> None:
        named = text if task is None else f"{task.db}.{task.table}: {text}"
        for line in named.split("\n"):
            self._progress.console.print(Text(printable(line), style="red" if error else ""))

    def _show_ranges(self, task: Task, active: list[RangeProgress]) -> None:
        bars = self._range_bars.setdefault(task.key, {})
        for gone in bars.keys() - {row.range_id for row in active}:
            self._progress.remove_task(bars.pop(gone))
        for row in active:
            if row.range_id not in bars:
                words = f"about {counted(row.rows_estimate, 'row')}"
                bars[row.range_id] = self._progress.add_task(f"  range {row.range_id}", total=None, words=words)
            if row.rows:
                self._progress.update(bars[row.range_id], total=max(row.rows, row.rows_estimate), completed=row.rows)
