"""Cancellation of the Spark jobs of one table, after a lost lease or some time after a stop request."""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from headwater.pipeline.run.ownership import LeaseRenewal

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GRACE_SECONDS = 20.0  # for a running commit after a stop request; supervisors kill after 30
_CHECK_SECONDS = 0.5


class JobCancellation:
    """A context that can cancel the Spark jobs which its thread starts, and gives them a scheduler pool of their own.

    Cancellation is safe: a commit is atomic.
    """

    def __init__(self, spark: SparkSession, heart: LeaseRenewal, stop: threading.Event, what: str) -> None:
        self._spark, self._heart, self._stop = spark, heart, stop
        self._group, self._what = f"headwater-{secrets.token_hex(8)}", what
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"brake of {what}", daemon=True)

    def __enter__(self) -> JobCancellation:
        context = self._spark.sparkContext
        context.setJobGroup(self._group, self._what, interruptOnCancel=True)
        context.setLocalProperty("spark.scheduler.pool", self._what)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        asked = 0.0
        while not self._over.wait(_CHECK_SECONDS):
            if self._stop.is_set():
                asked = asked or time.monotonic()
            if self._heart.lost.is_set() or (asked and time.monotonic() - asked > GRACE_SECONDS):
                with suppress(Exception):  # Java may have ended, and the jobs with it
                    self._spark.sparkContext.cancelJobGroup(self._group)
