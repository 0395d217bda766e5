"""Counting: how many rows of a frame Spark really read, without reading them twice."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PATIENCE_SECONDS = 2.0  # Spark tells a moment after the job is done; a sink with nothing to do ran no job
_STEP = 0.005


class Counting:
    """`frame` is the given one, observed; ask `rows` after it was used."""

    def __init__(self, frame: DataFrame) -> None:
        from pyspark.sql import Observation
        from pyspark.sql.functions import count, lit

        self._seen = Observation()
        self.frame = frame.observe(self._seen, count(lit(1)).alias("rows"))

    def rows(self) -> int:
        """What was counted; 0 when nothing was read. `Observation.get` alone would wait for ever then."""
        future = self._seen._jo.future()  # type: ignore[union-attr]  # the only way to ask without waiting
        until = time.monotonic() + PATIENCE_SECONDS
        while not future.isCompleted():
            if time.monotonic() > until:
                return 0
            time.sleep(_STEP)
        return int(self._seen.get["rows"])
