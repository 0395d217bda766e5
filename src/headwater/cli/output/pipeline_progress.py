"""Progress of one table into its sink, in numbers and words. Pure; lines and bars show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.model.quantity import amount, counted

if TYPE_CHECKING:
    from headwater.pipeline.run.task import RangeProgress, Task


class TableProgress:
    """The progress of one table. `offset` and `latest` are None until they are reported."""

    def __init__(self, task: Task) -> None:
        self.title = f"{task.db}.{task.table}"
        self.stage = "starts"
        self.offset: int | None = None
        self.latest: int | None = None
        self._ranges: dict[int, RangeProgress] = {}
        self._estimate = 0
        self._loaded_rows, self._loading_seconds = 0, 0.0
        self._step: tuple[int, float] | None = None

    def began(self, rows: int) -> None:
        """Begin a snapshot of about `rows` rows."""
        self._ranges.clear()
        self._estimate, self._loaded_rows, self._loading_seconds = rows, 0, 0.0

    def moved(self, row: RangeProgress) -> bool:
        """Note the progress of a range; return whether it changed."""
        news = self._ranges.get(row.range_id) != row
        gone = [known.range_id for known in self._ranges.values() if known.span.overlaps(row.span)]
        for range_id in gone:  # also those it was split off or merged from
            del self._ranges[range_id]
        self._ranges[row.range_id] = row
        return news

    def loaded(self, rows: int, seconds: float) -> None:
        """Count loaded rows of the snapshot."""
        self._loaded_rows += rows
        self._loading_seconds += seconds

    def stepped(self, upto: int, changes: int, seconds: float) -> None:
        """Note that the sink is at offset `upto`."""
        self.offset, self._step = upto, (changes, seconds)

    @property
    def rows(self) -> int:
        """Return the number of loaded rows of the snapshot, estimated for loaded ranges."""
        return sum(
            max(each.rows, each.rows_estimate) if each.is_loaded else each.rows for each in self._ranges.values()
        )

    @property
    def total(self) -> int:
        """Return the estimated number of rows of the snapshot."""
        return max(self._estimate, sum(max(each.rows, each.rows_estimate) for each in self._ranges.values()))

    @property
    def pace(self) -> float | None:
        """Return the rows per second of this snapshot; None before the first are loaded."""
        return self._loaded_rows / self._loading_seconds if self._loading_seconds and self._loaded_rows else None

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds until the snapshot is loaded, at this pace."""
        return max(0, self.total - self.rows) / self.pace if self.pace else None

    @property
    def lag(self) -> int | None:
        """Return the number of changes that the sink does not have yet; None if it is not known."""
        return None if self.offset is None or self.latest is None else max(0, self.latest - self.offset)

    def active(self, most: int) -> list[RangeProgress]:
        """Return the first `most` ranges that are not loaded yet, in key order."""
        waiting = sorted((r for r in self._ranges.values() if not r.is_loaded), key=lambda r: r.span.start)
        return waiting[:most]

    @property
    def ranges(self) -> tuple[int, int]:
        """Return how many ranges are loaded, and how many there are."""
        return sum(each.is_loaded for each in self._ranges.values()), len(self._ranges)

    @property
    def words(self) -> str:
        """Return the progress in a line."""
        if self.stage in ("register", "snapshot"):
            return ", ".join(self._loading())
        if self.offset is None:
            return self.stage
        words = [f"at offset {amount(self.offset)}"]
        if self.lag is not None:
            words.append("nothing is behind" if not self.lag else f"{counted(self.lag, 'change')} behind")
        if self._step is not None:
            changes, seconds = self._step
            words.append(f"last step {counted(changes, 'change')} in {seconds:.1f} s")
        return ", ".join(words)

    def _loading(self) -> list[str]:
        done, ranges = self.ranges
        words = [f"{amount(self.rows)} of {amount(self.total)} rows"]
        if ranges > 1:
            words.append(f"{done} of {ranges} ranges")
        if not 0 < self.rows < self.total:  # a pace says nothing before the first range, and nothing new after the last
            return words
        if self.pace is not None:
            words.append(f"{amount(round(self.pace))} rows/s")
        if self.seconds_left is not None:
            words.append(f"{duration(self.seconds_left)} left")
        return words


def duration(seconds: float) -> str:
    """Return `seconds` as text, such as `42 s`, `3 min 5 s` or `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
