"""A pipeline run: one Spark session and one thread per table that this server owns, until `stop` is set."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from headwater.errors import HeadwaterError, NotOwner, Unavailable
from headwater.pipeline.failure import cause_of, is_gone
from headwater.pipeline.metrics.endpoint import serve_metrics
from headwater.pipeline.metrics.metrics import PipelineMetrics
from headwater.pipeline.run.carry import Carry, CarryResult
from headwater.pipeline.run.events import Watcher, Watchers
from headwater.pipeline.run.job_cancellation import JobCancellation
from headwater.pipeline.run.ownership import LeaseRenewal, owner_name
from headwater.pipeline.run.progress import MetaStore
from headwater.pipeline.run.resources import check_promises, session_of, sink_of
from headwater.pipeline.run.server_check import TableAnswer, describe_tables, refusal
from headwater.pipeline.run.spec import PipelineSpec, TableSpec
from headwater.pipeline.run.table_report import TableReport
from headwater.pipeline.run.task import Task
from headwater.pipeline.verify.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RETRY_SECONDS = 1.0  # between two attempts to take a lease that another pipeline server holds
MOST_RETRY_SECONDS = 10.0  # longest wait after a lease was lost several times


class Summary(msgspec.Struct, frozen=True):
    """The result of a run, table by table."""

    tables: tuple[CarryResult, ...]
    reports: tuple[TableReport, ...] = ()

    @property
    def is_good(self) -> bool:
        """Return whether no table failed, and every verified sink equals its source."""
        return all(each.error is None for each in self.tables) and all(each.is_good for each in self.reports)


def run(
    spec: PipelineSpec,
    *,
    once: bool = False,
    master: str | None = None,
    watcher: Watcher | None = None,
    stop: threading.Event | None = None,
    then_verify: bool = False,
    spark: SparkSession | None = None,
) -> Summary:
    """Carry every table of `spec` until `stop` is set; with `once`, until changes before the start are in the sinks.

    With `then_verify` source and sinks are compared at the end. A session given by the caller is used and left open.
    Raise Unavailable if, with `once`, no server answers at the start.
    """
    check_promises(spec)
    stop, watcher = stop or threading.Event(), watcher or Watcher()
    with ExitStack() as stack:
        if spec.metrics:
            counted = PipelineMetrics(spec.name)
            stack.enter_context(serve_metrics(spec.metrics, counted.text))
            watcher = Watchers(counted, watcher)
        seen, away = _greeted(spec, once)
        meta = stack.enter_context(MetaStore.open(spec.meta))
        tasks = [meta.subscribe(spec, table) for table in spec.tables]
        if away is not None:
            for task in tasks:
                watcher.retrying(task, away, 1)
        refused = {
            task: why
            for task, table, each in zip(tasks, spec.tables, seen, strict=True)
            if not task.cancelled and (why := refusal(each, table, is_new=not meta.progress(task))) is not None
        }
        if len(refused) == len(tasks):
            return Summary(tuple(_refuse(task, why, spec, meta, watcher) for task, why in refused.items()))
        session = spark or stack.enter_context(session_of(spec, master))
        work = [
            lambda task=task, table=table: (
                _refuse(task, refused[task], spec, meta, watcher)
                if task in refused
                else _carry(session, spec, table, task, meta, watcher, stop, once)
            )
            for task, table in zip(tasks, spec.tables, strict=True)
        ]
        with ThreadPoolExecutor(len(work), thread_name_prefix="headwater-table") as threads:
            carried = tuple(threads.map(lambda each: each(), work))
        reports = verify(spec, watcher=watcher, spark=session) if then_verify else []
        return Summary(carried, tuple(reports))


def _greeted(spec: PipelineSpec, once: bool) -> tuple[list[TableAnswer], Unavailable | None]:
    """Return the server's answer for each table, or the error if no server answers and the run is not `once`."""
    try:
        return describe_tables(spec), None
    except Unavailable as error:
        if once:
            raise
        return [None] * len(spec.tables), error


def _refuse(task: Task, why: HeadwaterError, spec: PipelineSpec, meta: MetaStore, watcher: Watcher) -> CarryResult:
    """Report and record the failure of a table that the server cannot serve."""
    watcher.failed(task, why)
    with suppress(HeadwaterError):  # another pipeline server works on the table, and records the failure itself
        heart = LeaseRenewal(meta, task, owner_name(), spec.lease_seconds)
        try:
            meta.fail(task, f"{why.code}: {why.message}", heart.fence)
        finally:
            heart.stop()
    return CarryResult(task, 0, 0, why)


def _carry(
    spark: SparkSession,
    spec: PipelineSpec,
    table: TableSpec,
    task: Task,
    meta: MetaStore,
    watcher: Watcher,
    stop: threading.Event,
    once: bool,
) -> CarryResult:
    """Carry one table, from taking its lease to releasing it; a failure does not affect other tables.

    A lease is lost when this process or the meta store hangs. The table goes on from its sink once the lease is taken
    again, which waits for another pipeline server that has taken it over.
    """
    losses = 0
    while True:
        fence: int | None = None
        try:
            with _leased(meta, task, spec, stop, watcher, for_ever=not once) as heart:
                if heart is None:
                    return CarryResult(task, 0, 0)
                fence = heart.fence
                with (
                    sink_of(spec, table, task, meta, spark, heart.fence) as sink,
                    JobCancellation(spark, heart, stop, str(task)),
                ):
                    carry = Carry(
                        spark, spec, table, task, sink, meta, watcher, heart=heart, stop=stop, until_caught_up=once
                    )
                    done = carry.run()
                    watcher.done(task, done.offset, done.rows)
                    return done
        except Exception as error:
            if stop.is_set() and is_gone(error):
                return CarryResult(task, 0, 0)  # the stop request has also ended Java
            cause = cause_of(error)
            if fence is not None and isinstance(cause, NotOwner):
                losses += 1
                watcher.retrying(task, cause, losses)
                stop.wait(min(RETRY_SECONDS * losses, MOST_RETRY_SECONDS))
                continue
            watcher.failed(task, cause)
            if fence is not None:
                with suppress(HeadwaterError):  # the meta store does not answer, or the task was reset
                    meta.fail(task, f"{cause.code}: {cause.message}", fence)
            return CarryResult(task, 0, 0, cause)


@contextmanager
def _leased(
    meta: MetaStore, task: Task, spec: PipelineSpec, stop: threading.Event, watcher: Watcher, *, for_ever: bool
) -> Iterator[LeaseRenewal | None]:
    """Hold the lease on `task`; yield None if `stop` is set first. Wait while another server holds it.

    Unless `for_ever`, raise NotOwner if it stays taken, or the error of the meta store, after the time in which the
    lease of a server that died expires.
    """
    owner, asked = owner_name(), 0
    until = time.monotonic() + spec.lease_seconds + RETRY_SECONDS
    while True:
        try:
            heart = LeaseRenewal(meta, task, owner, spec.lease_seconds)
            break
        except HeadwaterError as error:
            asked += 1
            can_wait = isinstance(error, NotOwner) or error.retryable
            if not can_wait or (not for_ever and time.monotonic() > until):
                raise
            if asked == 1:
                watcher.retrying(task, error, asked)
            if stop.wait(RETRY_SECONDS):
                yield None
                return
    try:
        yield heart
    finally:
        heart.stop()
