"""Count the rows or changes of a DataFrame while Spark reads it, so that the data is not read a second time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from headwater.pipeline.transform.compaction import PREIMAGE, quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PATIENCE_SECONDS = 2.0  # Spark reports shortly after the job has ended; a sink with nothing to do ran no job
_STEP = 0.005
POSTIMAGE = "update_postimage"


class Counting:
    """A counter of the rows that a job reads: run the job on `frame`, then call `rows`.

    With the column name `change_type` the counter counts changes: the two images of an update are one change. Rows
    with a value in the column `end` are not counted, see part_ends.py.
    """

    def __init__(self, frame: DataFrame, change_type: str | None = None, end: str | None = None) -> None:
        from pyspark.sql import Observation
        from pyspark.sql.functions import count_if, lit

        kind = lit("") if change_type is None else frame[quoted(change_type)]
        is_row = lit(True) if end is None else frame[quoted(end)].isNull()
        images = [count_if(kind == image).alias(image) for image in (PREIMAGE, POSTIMAGE)]
        self._seen = Observation()
        self.frame = frame.observe(self._seen, count_if(is_row).alias("rows"), *images)

    def rows(self) -> int:
        """Return the count; 0 if no job read the frame, where `Observation.get` alone would wait for ever."""
        future = self._seen._jo.future()  # type: ignore[union-attr]  # the only way to ask without waiting
        until = time.monotonic() + PATIENCE_SECONDS
        while not future.isCompleted():
            if time.monotonic() > until:
                return 0
            time.sleep(_STEP)
        found = self._seen.get
        # One image of an update may be missing: its key is in another range, or `where` excludes its row.
        return int(found["rows"]) - min(int(found[PREIMAGE]), int(found[POSTIMAGE]))
