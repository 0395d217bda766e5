"""Counting: how many rows or changes of a frame Spark really read, without reading them twice."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from headwater.pipeline.transform.compaction import PREIMAGE, quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PATIENCE_SECONDS = 2.0  # Spark tells a moment after the job is done; a sink with nothing to do ran no job
_STEP = 0.005
POSTIMAGE = "update_postimage"


class Counting:
    """`frame` is the given one, observed; ask `rows` after it was used.

    With the name of its column `change_type` it counts changes: the two images of an update are one. The rows
    that have something in the column `end` are none, see ends.
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
        """What was counted; 0 when nothing was read. `Observation.get` alone would wait for ever then."""
        future = self._seen._jo.future()  # type: ignore[union-attr]  # the only way to ask without waiting
        until = time.monotonic() + PATIENCE_SECONDS
        while not future.isCompleted():
            if time.monotonic() > until:
                return 0
            time.sleep(_STEP)
        found = self._seen.get
        # One image of an update may be missing: its other key is of another range, or its row not chosen.
        return int(found["rows"]) - min(int(found[PREIMAGE]), int(found[POSTIMAGE]))
