"""Parquet history: every row of the snapshot and every change, in files that any reader can open; exactly once.

    <path>/_headwater.json                             the plan
    <path>/snapshot=<plan>/commit=part-<span>/         rows of a part, and _commit.json
    <path>/snapshot=<plan>/commit=step-<after>/        changes of a step, and _commit.json
    <path>/_staging-<…>/                               files of running tasks; `begin` removes those of crashed runs

A commit is one rename, under a lock on the folder. On file systems without locks the layout still fences: only
`begin` creates a plan's folder, and it moves the folders of other plans away, so that the rename of an old run fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headwater.errors import SinkFenced, SinkUnfit
from headwater.model.keys.key import Span
from headwater.model.table import Table
from headwater.pipeline.sinks.columns import numbered
from headwater.pipeline.sinks.history import as_history
from headwater.pipeline.sinks.parquet.files import REPORT, FileWriter, WrittenFile, durable, sync_folder, write_file
from headwater.pipeline.sinks.sink import HISTORY, Part, Plan, Sink, State, Step, check, of_plan
from headwater.pipeline.transform.compaction import change_columns, quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PLAN, LOCK, COMMIT = "_headwater.json", "_headwater.lock", "_commit.json"
_STAGING, _OLD = "_staging-", "_old-"
_SNAPSHOT, _PART, _STEP = "snapshot=", "commit=part-", "commit=step-"


class Commit(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of a commit folder: the rows of a part, or the changes up to an offset."""

    span: Span | None = None
    version: int = 0
    upto: int = 0


class ParquetSink(Sink):
    """The history of a table, in a folder of a file system that driver and executors share."""

    mode = HISTORY

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self.name = f"parquet {self._path}"

    def state(self) -> State | None:
        try:
            plan = msgspec.json.decode((self._path / PLAN).read_bytes(), type=Plan)
        except FileNotFoundError:
            return None
        folder = self._folder(plan.id)
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
        steps = [name for name in names if name.startswith(_STEP)]
        offset = _commit(folder / steps[-1]).upto if steps else plan.offset
        parts = [_commit(folder / name) for name in names if name.startswith(_PART)]
        loaded = {part.span: part.version for part in parts if part.span and (not steps or part.version > offset)}
        return State(plan, offset, loaded)

    def begin(self, plan: Plan) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        with self._locked():
            self._folder(plan.id).mkdir(exist_ok=True)
            durable(self._path / PLAN, msgspec.json.encode(plan))
            self._clean(plan.id, (_SNAPSHOT, _STAGING, _OLD))

    def load(self, frame: DataFrame, plan: Plan, parts: Sequence[Part]) -> None:
        """See Sink. Also removes older snapshots: after a run killed in `begin`, the next run only loads."""
        with self._locked():
            loaded = of_plan(self.state(), plan.id).loaded
            self._clean(plan.id, (_SNAPSHOT,))  # a staging folder may belong to another driver
        skipped = frozenset(place for place, part in enumerate(parts) if part.span in loaded)
        with self._staged(as_history(frame, plan.table, parts), plan.id, skipped) as (staging, reports):
            for place, part in enumerate(parts):
                files = [report.file for report in reports if report.partition == place]
                with self._locked():
                    if part.span not in of_plan(self.state(), plan.id).loaded:
                        commit = Commit(part.span, part.version)
                        # Hashed, because a key may be longer than a file name can be.
                        name = _PART + sha256(msgspec.json.encode(part.span)).hexdigest()[:32]
                        self._commit(plan.id, name, staging, files, commit)

    def apply(self, frame: DataFrame, step: Step, table: Table) -> None:
        if step.repair:
            raise SinkUnfit("a history cannot be repaired")
        while (todo := check(self.state(), step)) is not None:
            left = frame.where(f"{quoted(change_columns(frame).offset)} > {todo.after}")
            with self._staged(left, step.plan) as (staging, reports), self._locked():
                if check(self.state(), step) == todo:
                    name = f"{_STEP}{todo.after:020}"
                    self._commit(step.plan, name, staging, [report.file for report in reports], Commit(upto=todo.upto))

    def evolve(self, table: Table) -> None:
        """See Sink. Existing files keep their columns: read them with `mergeSchema`."""
        with self._locked():
            state = self.state()
            if state is None:
                raise SinkFenced("the sink holds no snapshot")
            durable(self._path / PLAN, msgspec.json.encode(msgspec.structs.replace(state.plan, table=table)))

    def rows(self, spark: SparkSession) -> DataFrame:
        raise SinkUnfit("a history holds changes, not the current rows")

    def _folder(self, plan: str) -> Path:
        return self._path / (_SNAPSHOT + plan)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            lock = os.open(self._path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            raise SinkFenced("the folder of the sink was removed") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    @contextlib.contextmanager
    def _staged(
        self, frame: DataFrame, plan: str, skipped: frozenset[int] = frozenset()
    ) -> Iterator[tuple[Path, list[WrittenFile]]]:
        """Write the frame to a new staging folder; remove the folder at the end, with files of other attempts."""
        staging = self._path / f"{_STAGING}{uuid.uuid4().hex}"
        try:
            staging.mkdir()
            yield staging, self._files(frame, plan, FileWriter(str(staging), frame.columns, skipped))
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _files(self, frame: DataFrame, plan: str, writer: FileWriter) -> list[WrittenFile]:
        try:
            return [WrittenFile(*row) for row in numbered(frame).mapInArrow(writer, REPORT).collect()]
        except Exception:
            of_plan(self.state(), plan)  # raises SinkFenced if a newer run removed the folder
            raise

    def _commit(self, plan: str, name: str, staging: Path, files: Sequence[str], commit: Commit) -> None:
        """Make files and progress visible together by one rename."""
        made = staging / uuid.uuid4().hex
        try:
            made.mkdir()
            for file in files:
                os.rename(staging / file, made / file)
            write_file(made / COMMIT, msgspec.json.encode(commit))
            sync_folder(made)
            os.rename(made, self._folder(plan) / name)
            sync_folder(self._folder(plan))
        except OSError:
            raise SinkFenced("the folder of this snapshot was removed, or written by another run") from None

    def _clean(self, plan: str, kinds: tuple[str, ...]) -> None:
        """Remove folders of these kinds that do not belong to the plan."""
        names = [name for name in os.listdir(self._path) if name.startswith(kinds) and name != _SNAPSHOT + plan]
        for name in names:
            self._remove(name)
        if names:
            sync_folder(self._path)

    def _remove(self, name: str) -> None:
        """Hide a folder from readers by one rename, then delete it."""
        old = self._path / f"{_OLD}{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._path / name, old)
            shutil.rmtree(old, ignore_errors=True)


def _commit(folder: Path) -> Commit:
    return msgspec.json.decode((folder / COMMIT).read_bytes(), type=Commit)


def open_parquet(settings: Mapping[str, Any], context: object = None) -> ParquetSink:
    """Return a sink from its checked settings: `path`, and `mode`, which can only be history."""
    if settings.get("mode", HISTORY) != HISTORY:
        raise SinkUnfit("parquet files cannot be changed, so they hold a history only", hint=_DELTA)
    path = settings["path"].removeprefix("file://")
    if "://" in path:
        raise SinkUnfit("a parquet history needs a file system with renames", hint=_DELTA)
    return ParquetSink(Path(path))


_DELTA = 'Use kind = "delta" for that.'
