"""The differential kit over PostgreSQL: random tables, queries and writes; every answer is compared with a new
execution.

If the server would answer 304 for a tag, or a feed sends no invalidation, the answer must be unchanged: in order if the
analysis says that the order is total, as a multiset otherwise; a failure counts as an answer. One database serves many
trials, one after another, each with its own names.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import msgspec
import psycopg
from tests.soundness.pg_schemas import Query, Step, World
from tests.soundness.server_answers import Product
from tests.sources.postgres.pg_source import PgRig
from tests.suite.deadlines import PATIENCE

from headwater.errors import HeadwaterError
from headwater.model.change import Change
from headwater.model.dependencies.dependency import ALWAYS, Analysis
from headwater.model.row_msgpack import encode_row
from headwater.queries.dependencies.bound_dependencies import BoundDependencies, bind
from headwater.queries.dependencies.instance_router import Router
from headwater.sources.postgres.snapshot_visibility import VisibleOffset
from headwater.sources.write import Session

QUERIES, STEPS = 12, 8


class Unsound(Exception):
    """An answer changed although the server would have said that it did not."""


class Seen(msgspec.Struct):
    """An answer: its rows as bytes, in order, and its offset; `rows` is None for a failure."""

    rows: list[bytes] | None
    offset: int
    epoch: str

    def same(self, other: Seen, in_order: bool) -> bool:
        if self.rows is None or other.rows is None:
            return self.rows is other.rows
        return self.rows == other.rows or (not in_order and sorted(self.rows) == sorted(other.rows))


class Instance:
    """A query with its arguments, and the answers that a client might hold."""

    def __init__(self, number: int, query: Query) -> None:
        self.number, self.query = number, query
        self.analysis: Analysis | None = None
        self.bound: BoundDependencies | None = None
        self.args: dict[str, Any] = {}
        self.held: list[Seen] = []  # the newest last


class _Slow:
    """Determines the offsets of answers, and runs `between` once between an answer and its offset."""

    def __init__(self, positions: Any) -> None:
        self._positions = positions
        self.between: Callable[[], None] | None = None

    def reading(self) -> AbstractContextManager[None]:
        found: AbstractContextManager[None] = self._positions.reading()
        return found

    def seen(self, snapshot: str) -> int:
        self._pass()
        return int(self._positions.seen(snapshot))

    def place(self, snapshot: str) -> VisibleOffset:
        self._pass()
        found: VisibleOffset = self._positions.place(snapshot)
        return found

    def _pass(self) -> None:
        between, self.between = self.between, None
        if between is not None:
            between()


class Kit:
    """One database for many trials."""

    def __init__(self, rig: PgRig) -> None:
        self.rig = rig
        self.product = Product(rig.source)  # type: ignore[arg-type]
        self.slow: Any = _Slow(rig.source.snapshot_positions)
        rig.source._analyses._visibility = self.slow
        self.numbers = itertools.count()
        self.trials = itertools.count()
        self.other = rig.server.connect(rig.name)
        self.late = rig.server.connect(rig.name)
        for each in (self.other, self.late):
            each.execute("SET lock_timeout = 100")  # what waits for the one that is open fails instead
        self.late.autocommit = False

    def pull(self) -> list[tuple[int, Change]]:
        """Capture and return everything committed by now, with offsets."""
        found: list[tuple[int, Change]] = []
        parts = self.rig.pull()
        self.product.append(parts)
        for part in parts:
            found += enumerate(part.changes, part.first)
        self.rig.acknowledge()
        return found

    def close(self) -> None:
        self.other.close()
        self.late.close()


class Trial:
    """One run of a seed."""

    def __init__(self, kit: Kit, seed: int, counts: Counter[str], world: World | None = None) -> None:
        self.kit, self.seed, self.counts = kit, seed, counts
        self.world = world or World(seed, f"x{next(kit.trials)}_")
        self.random = random.Random(f"trial {seed}")
        self.source, self.product = kit.rig.source, kit.product
        self.router = Router(self.source)
        self.done: list[str] = []
        self.tables: dict[str, Any] = {}
        self.instances: list[Instance] = []

    def run(self) -> None:
        """Run the seed; raise Unsound if the property fails."""
        try:
            for sql in self.world.setup:
                self._run(self.kit.other, sql)
            self.kit.pull()
            self.instances = [Instance(next(self.kit.numbers), query) for query in self.world.queries(QUERIES)]
            for instance in self.instances:
                self.prepare(instance)
            for step in self.world.steps(STEPS):
                self.step(step)
        finally:
            for instance in self.instances:
                self.product.forget(instance.number)
            self.kit.late.rollback()
            names = ", ".join(table.name for table in self.world.tables)
            with self.kit.other.transaction():
                self.kit.other.execute("SET LOCAL lock_timeout = 0")  # the server may be tidying up
                self.kit.other.execute(f"DROP TABLE IF EXISTS {names} CASCADE".encode())

    def _run(self, connection: Any, sql: str) -> None:
        """Run a statement in a transaction; a failing one leaves nothing behind."""
        try:
            with connection.transaction():
                connection.execute(sql.encode())
            self.done.append(f"{'late ' if connection is self.kit.late else ''}{sql};")
        except psycopg.Error:
            self.counts["refused writes"] += 1

    def fail(self, instance: Instance, why: str) -> None:
        analysis = instance.analysis
        told = "" if analysis is None else "".join(f"\n  {one}" for one in analysis.dependencies)
        extra = "" if analysis is None else f"\n{analysis.sql}\ntotal={analysis.is_total} doubts={analysis.doubts}"
        script = "\n".join(self.done)
        query = f"{instance.query.sql}\n{instance.query.args!r}"
        raise Unsound(f"SOUNDNESS_SEED={self.seed}\n{script}\n\n{why}\n{query}{extra}{told}")

    # --- one instance ----------------------------------------------------------------------------------------

    def prepare(self, instance: Instance) -> None:
        """Analyse, bind and execute a query; drop it if PostgreSQL itself refuses it."""
        self.router.remove(instance.number)
        self.product.forget(instance.number)
        instance.analysis, instance.bound, instance.held = None, None, []
        try:
            analysis = self.source.analyse(instance.query.sql)
        except HeadwaterError:
            self.counts["refused"] += 1
            return
        self.counts["queries"] += 1
        if analysis.volatile:
            self.counts["not kept"] += 1
            return
        self.counts["total"] += analysis.is_total
        self.counts["with conditions"] += any(each.condition != ALWAYS for each in analysis.dependencies)
        self.counts["with columns"] += any(each.columns is not None for each in analysis.dependencies)
        instance.analysis, instance.args = analysis, instance.query.args
        tables = self.tables = self.tables or self.source.describe()
        instance.bound = bind(self.source, tables, analysis, instance.args)
        sql = instance.query.sql
        self.product.prepare(instance.number, sql, analysis, instance.args, instance.bound, tables)
        self.router.add(instance.number, instance.bound)
        instance.held = [found] if (found := self.answer(instance)) is not None else []
        self._as_written(instance)

    def _as_written(self, instance: Instance) -> None:
        """Check that the analysed statement returns the rows of the original one."""
        with contextlib.suppress(HeadwaterError):
            read = self.source.read(instance.query.sql, [*instance.args.values()])
            rows = sorted(map(encode_row, read.rows))
            if instance.held and instance.held[-1].rows is not None and rows != sorted(instance.held[-1].rows):
                self.fail(instance, "the answer is not that of the statement as it was written")

    def answer(self, instance: Instance) -> Seen | None:
        """Return the current answer; None if the query must be analysed again."""
        assert instance.analysis is not None
        try:
            read = self.source.answer(instance.analysis, instance.args)
        except HeadwaterError:
            self.counts["failed at run time"] += 1
            return Seen(None, self.kit.rig.latest, instance.analysis.epoch)
        if read is None:
            return None
        self.counts["with rows"] += bool(read.rows)
        return Seen([encode_row(row) for row in read.rows], read.offset, instance.analysis.epoch)

    # --- one step --------------------------------------------------------------------------------------------

    def step(self, step: Step) -> None:
        """Write and check; with a late transaction, check while it is open and after its commit."""
        for sql in step.late:
            self.done.append("-- one that commits late")
            self._run(self.kit.late, sql)
        changes: list[tuple[int, Change]] = []
        slow = self._slowly(lambda: changes.extend(self._written(step)))
        if self.kit.slow.between is not None:  # nobody asked
            self.kit.slow.between = None
            changes += self._written(step)
        self.look(changes, slow)
        if step.late:
            self.done.append("-- it commits")
            self.kit.late.commit()
            self.look(self.kit.pull())

    def _slowly(self, write: Callable[[], None]) -> dict[int, Seen]:
        """Return an answer that is read before `write` and gets its offset after it."""
        self.kit.slow.between = write
        ready = [one for one in self.instances if one.analysis is not None and one.held]
        if not ready:
            return {}
        instance = self.random.choice(ready)
        found = self.answer(instance)
        return {} if found is None else {instance.number: found}

    def _written(self, step: Step) -> list[tuple[int, Change]]:
        """Write and return the captured changes."""
        if step.own:
            self.done.append("-- by our writer")
            self.source.write(lambda session: [self._own(session, sql) for sql in step.statements]).result(PATIENCE)
        elif len(step.statements) == 1 or step.is_schema:
            self._run(self.kit.other, step.statements[0])
        else:
            with contextlib.suppress(psycopg.Error), self.kit.other.transaction():
                for sql in step.statements:
                    self._run(self.kit.other, sql)
        return self.kit.pull()

    def _own(self, session: Session, sql: str) -> None:
        with contextlib.suppress(HeadwaterError):
            session.execute(sql)
            self.done.append(f"{sql};")

    def look(self, changes: list[tuple[int, Change]], slow: Mapping[int, Seen] = MappingProxyType({})) -> None:
        """Compare every answer with earlier ones, and with one that was read during the write."""
        self.tables = {}
        self.product.versions.advance()
        routed = {(key, offset) for offset, change in changes for key, _ in self.router.route(change)}
        for instance in self.instances:
            if instance.analysis is None or instance.bound is None:
                continue
            matter = {offset for offset, change in changes if instance.bound.matters(change) is not None}
            if matter != {offset for key, offset in routed if key == instance.number}:
                self.fail(instance, f"the router says otherwise than the matcher: {matter}")
            self._check(instance, bool(matter), changes, slow.get(instance.number))

    def _check(self, instance: Instance, matters: bool, changes: list[tuple[int, Change]], slow: Seen | None) -> None:
        assert instance.analysis is not None
        now = self.answer(instance)
        if now is None:
            self.counts["means another"] += 1
            return self.prepare(instance)
        in_order = instance.analysis.is_total
        if instance.held and instance.held[-1].rows is not None:
            self.counts["pairs"] += 1
            changed = not now.same(instance.held[-1], in_order)
            self.counts["changed"] += changed
            self.counts["told"] += matters
            if changed and not matters:
                told = [change for _, change in changes]
                self.fail(instance, f"nothing matters in {told}\nwas {instance.held[-1]}\nis  {now}")
        for before in [*instance.held, *([] if slow is None else [slow])]:
            if before.rows is not None and self.product.is_current(instance.number, before.offset):
                self.counts["304"] += 1
                if not now.same(before, in_order):
                    self.fail(instance, f"a 304 for {before}\nis  {now}")
        instance.held = [*instance.held[-2:], now] if self.random.random() < 0.8 else [*instance.held, now]
        return None
