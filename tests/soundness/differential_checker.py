"""The differential kit: a captured database, many queries, random writes; every answer is compared with a new
execution.

If no write is relevant to an instance, its answer must be unchanged: in order if the analysis says that the order is
total, as a multiset otherwise. Capture runs only when a trial calls `follow`.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import msgspec
from tests.soundness.grammar import Queries, Query
from tests.soundness.naive_matcher import Judge
from tests.soundness.schemas import Step, World
from tests.soundness.server_answers import Product
from tests.sources.sqlite_source import MemoryNotes
from tests.suite.deadlines import PATIENCE

from headwater.errors import HeadwaterError
from headwater.model.change import Change, Op
from headwater.model.dependencies.dependency import Analysis
from headwater.queries.dependencies.bound_dependencies import bind
from headwater.queries.dependencies.change_sketch import Sketch
from headwater.queries.dependencies.instance_router import Router
from headwater.sources.sqlite.query.statement_growth import TOO_LARGE
from headwater.sources.sqlite.settings import SqliteConfig
from headwater.sources.sqlite.source import SqliteSource
from headwater.sources.write import Session

Places = dict[int, int | None]  # offset to the first place it matters to
Routed = dict[tuple[int, Any], int]  # offset and key to the place
QUERIES = 12
STEPS = 10
SLOW_SECONDS = 1.0  # an answer that takes longer is asked for no more


class Case(msgspec.Struct):
    """One trial as text, to be shrunk and printed."""

    setup: list[str]
    queries: list[Query]
    steps: list[Step]

    def script(self) -> str:
        """Return the case as SQL to read and run."""
        lines = [*(f"{sql};" for sql in self.setup), ""]
        lines += [f"-- query: {one.sql}\n-- args: {one.args!r}" for one in self.queries]
        for step in self.steps:
            lines += ["", f"-- {'another process' if step.foreign else 'a transaction'}"]
            lines += [f"{sql};" for sql in step.statements]
        return "\n".join(lines)


class Unsound(Exception):
    """An answer changed although no write was relevant to it, or two implementations disagree."""


class Instance:
    """A query with its arguments, and the last answer of it that a client might hold."""

    def __init__(self, number: int, query: Query) -> None:
        self.number, self.query = number, query
        self.analysis: Analysis | None = None
        self.bound: Any = None
        self.args: dict[str, Any] = {}
        self.now: Answer | None = None  # after the last step
        self.held: Answer | None = None  # at some earlier step
        self.seen_rows = self.seen_change = self.is_slow = False


class Answer(msgspec.Struct):
    """An answer in forms that compare type by type."""

    ordered: str
    multiset: list[str]
    offset: int
    epoch: str

    def same(self, other: Answer, in_order: bool) -> bool:
        return self.ordered == other.ordered or (not in_order and self.multiset == other.multiset)


def make_case(seed: int, queries: int = QUERIES, steps: int = STEPS) -> Case:
    """Return the case of a seed."""
    world = World(seed)
    grammar = Queries(world)
    for _ in range(world.pick([0, 1, 1, 2, 2])):
        world.add_view(*grammar.view())
    made = [grammar.query() for _ in range(queries)]
    taken = [step for _ in range(steps) for step in (world.step(), *world.plan_steps())]
    return Case(world.setup, made, [*taken, world.last_step()])


def folder() -> str:
    """Create a folder for a trial, in memory if the machine has /dev/shm."""
    memory = Path("/dev/shm")
    return tempfile.mkdtemp(prefix="headwater-", dir=memory if memory.is_dir() else None)


class Trial:
    """One run of a case. `agree` also compares the matcher with the judge; mutants must be found without that."""

    def __init__(self, case: Case, counts: Counter[str], *, agree: bool = True, judge: Judge | None = None) -> None:
        self.case, self.counts, self.agree = case, counts, agree
        self.judge = judge or Judge()
        self.after = 0
        self.random = random.Random(len(case.steps) * 1_000 + len(case.queries))
        self.askers = random.Random(len(case.steps))
        self.readers = random.Random(len(case.queries))

    def run(self) -> None:
        """Run the case; raise Unsound if the property fails."""
        place = folder()
        try:
            with self._opened(place):
                self._run()
        finally:
            shutil.rmtree(place)

    @contextlib.contextmanager
    def _opened(self, place: str) -> Iterator[None]:
        path = f"{place}/app.db"
        self.other = apsw.Connection(path)
        self.other.execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF")
        self.other.set_busy_timeout(10_000)
        with self.other:
            for sql in self.case.setup:
                with contextlib.suppress(apsw.Error):
                    self.other.execute(sql)
        self.source = SqliteSource("app", path, notes=MemoryNotes(), config=SqliteConfig(wal=True))
        try:
            assert self.source.prove(generation="g", latest=0, read=lambda after: iter(())) == ""
            self.product = Product(self.source)
            yield
        finally:
            self.source.close()
            self.other.close()

    def _run(self) -> None:
        self.pull()
        self.router, self.sketch = Router(self.source), Sketch(self.after)
        self.instances = [Instance(n, query) for n, query in enumerate(self.case.queries)]
        for instance in self.instances:
            self.prepare(instance)
        for place, step in enumerate(self.case.steps, 1):
            self._is_last = place == len(self.case.steps)
            self.step(step)
        self._shake()
        self.counts["held back by guards"] += self.product.versions.guarded.suppressed
        self.counts["current by guards"] += self.product.versions.allowed
        for instance in self.instances:
            self.counts["queries"] += 1
            self.counts["queries with rows"] += instance.seen_rows
            self.counts["queries that changed"] += instance.seen_change
            self.counts["queries with rows that changed"] += instance.seen_change and instance.seen_rows

    def fail(self, instance: Instance, why: str) -> None:
        analysis = instance.analysis
        told = "" if analysis is None else "".join(f"\n  {one}" for one in analysis.dependencies)
        extra = "" if analysis is None else f"\n{analysis.sql}\ntotal={analysis.is_total} doubts={analysis.doubts}"
        raise Unsound(f"{why}\n{instance.query.sql}\n{instance.query.args!r}{extra}{told}")

    # --- one instance ----------------------------------------------------------------------------------------

    def prepare(self, instance: Instance) -> None:
        """Analyse, bind and execute a query; drop it if the engine itself refuses it."""
        if instance.bound is not None:
            self.router.remove(instance.number)
        self.product.forget(instance.number)
        instance.analysis = instance.bound = instance.now = instance.held = None
        try:
            analysis = self.source.analyse(instance.query.sql)
        except HeadwaterError as error:
            if error.message == TOO_LARGE:
                self.counts["refused as too large"] += 1  # `run` of the random suites bounds their number
            elif accepts(self.other, instance.query.sql):
                self.fail(instance, f"analyse refuses what the engine accepts: {error.message}")
            self.counts["refused by the engine"] += 1
            return
        except Exception as error:
            self.fail(instance, f"analyse raises {error!r}")
        if instance.query.volatile and not analysis.volatile:
            self.fail(instance, "a volatile query is called cacheable")
        if analysis.volatile:
            self.counts["volatile"] += 1
            return
        self.counts["doubtful"] += bool(analysis.doubts)
        self.counts["total"] += analysis.is_total
        self.counts["analysed"] += 1
        instance.analysis = analysis
        instance.args = {name: instance.query.args.get(name) for name in analysis.parameters}
        tables = self.source.describe()
        instance.bound = bind(self.source, tables, analysis, instance.args)
        self.product.prepare(instance.number, instance.query.sql, analysis, instance.args, instance.bound, tables)
        self.router.add(instance.number, instance.bound)
        self.sketch.version(instance.bound)  # as a tag is made: from here on the sketch watches for it
        instance.now = instance.held = self.answer(instance)
        self.ask(instance)

    def ask(self, instance: Instance) -> None:
        """Request the answer from the server, which may record guards from it."""
        self.counts["guarded answers"] += self.product.ask(instance.number)

    def answer(self, instance: Instance) -> Answer | None:
        """Return the current answer; None if it fails or the tables of the query have changed."""
        assert instance.analysis is not None
        began = time.monotonic()
        try:
            with self._reader():
                read = self.source.answer(instance.analysis, instance.args)
            instance.is_slow |= time.monotonic() - began > SLOW_SECONDS
        except HeadwaterError:
            self.counts["failed at run time"] += 1
            return None
        if read is None:
            return None
        if read.offset != self.after:
            self.fail(instance, f"an answer says offset {read.offset} where the log ends at {self.after}")
        instance.seen_rows |= bool(read.rows)
        rows = [repr(row) for row in read.rows]
        return Answer("\n".join(rows), sorted(rows), read.offset, instance.analysis.epoch)

    def _reader(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which, at random, another connection than before answers."""
        return self.source._pool.read() if self.readers.random() < 0.2 else contextlib.nullcontext()

    # --- one step --------------------------------------------------------------------------------------------

    def pull(self) -> list[tuple[int, Change]]:
        """Capture and return the changes since the last call, with their offsets."""
        found: list[tuple[int, Change]] = []
        while new := list(self.source.follow(after=self.after)):
            self.product.append(new)
            for part in new:
                found += enumerate(part.changes, part.first)
                self.after = part.upto
        return found

    def step(self, step: Step) -> None:
        """Write, then compare every answer with the one before and with an older one."""
        slow, early = (self.askers.choices(self.instances, k=min(2, len(self.instances))) for _ in "12")
        begun = {instance.number: self.product.begin(instance.number) for instance in slow}
        self.write(step)
        for instance in early:
            self.ask(instance)  # the log is behind, as it may be
        changes = self.pull()
        self.product.versions.advance()
        for number, read in begun.items():
            self.product.ask(number, read)
        self.counts["changes"] += len(changes)
        for offset, change in changes:
            self.sketch.apply(offset, change)
        routed = self._routed(changes)
        for instance in self.instances:
            if instance.analysis is not None and instance.bound is not None:
                self._check(instance, changes, routed)
            elif any(change.op is Op.SCHEMA_CHANGE for _, change in changes) and not self._is_last:
                self.prepare(instance)
        for instance in [one for one in self.instances if one.is_slow]:
            self._leave_out(instance)

    def _leave_out(self, instance: Instance) -> None:
        """Drop a query whose answer takes seconds: nested joins grow with every row."""
        if instance.bound is not None:
            self.router.remove(instance.number)
        self.product.forget(instance.number)
        self.instances.remove(instance)
        self.counts["left out as slow"] += 1

    def _shake(self) -> None:
        """Check that answers with a total order are the same when the engine scans in reverse."""
        total = [one for one in self.instances if one.now is not None and one.analysis and one.analysis.is_total]
        if not total:
            return
        for backwards in (1, 0):
            for reader in self.source._pool._idle:
                reader.guard.run(f"PRAGMA reverse_unordered_selects = {backwards}")
            for instance in total if backwards else ():
                before, now = instance.now, self.answer(instance)
                self.counts["shaken"] += 1
                if now is not None and before is not None and now.ordered != before.ordered:
                    self.fail(instance, f"the order is not total\nonce  {before}\nagain {now}")

    def write(self, step: Step) -> None:
        """Run the statements of a step; failing ones leave nothing behind."""
        if not step.foreign:
            self.source.write(lambda session: [_attempt(session, sql) for sql in step.statements]).result(PATIENCE)
            return
        for sql in step.statements:
            with contextlib.suppress(apsw.Error):
                self.other.execute(sql)

    def _routed(self, changes: list[tuple[int, Change]]) -> Routed:
        """Return the matching table reference by offset of the change and number of the instance."""
        return {(offset, key): place for offset, change in changes for key, place in self.router.route(change)}

    def _check(self, instance: Instance, changes: list[tuple[int, Change]], routed: Routed) -> None:
        bound, analysis = instance.bound, instance.analysis
        assert bound is not None and analysis is not None
        places = {offset: bound.matters(change) for offset, change in changes}
        matter = {offset for offset, place in places.items() if place is not None}
        if self.agree:
            self._agree(instance, changes, places, routed)
        before, now = instance.now, self.answer(instance)
        in_order = analysis.is_total
        if now is None or before is None:  # failed, means something else, or is planned otherwise by now
            return self._again(instance, now)
        changed = not now.same(before, in_order)
        instance.seen_change |= changed
        is_current = self.product.is_current(instance.number, before.offset)
        self._count(changes, analysis, bool(matter), not is_current, changed)
        if changed and (is_current or not matter):
            why = "the server passes over" if matter else "nothing matters in"
            self.fail(instance, f"{why} {changes_text(changes)}\nwas {before.ordered!r}\nis  {now.ordered!r}")
        instance.now = now
        if not is_current or self.askers.random() < 0.1:
            self.ask(instance)
        return self._check_held(instance, now, in_order)

    def _again(self, instance: Instance, now: Answer | None) -> None:
        instance.now = instance.held = now
        if now is None and not self._is_last:
            self.prepare(instance)
        else:
            self.ask(instance)

    def _check_held(self, instance: Instance, now: Answer, in_order: bool) -> None:
        """Check over several steps the answer to a client with an old tag, and the verdict of the sketch alone."""
        held, bound = instance.held, instance.bound
        assert held is not None and bound is not None
        if self.sketch.version(bound) <= held.offset:
            self.counts["sketch says valid"] += 1
            if not now.same(held, in_order):
                self.fail(
                    instance, f"the sketch stands at or below {held.offset}\nwas {held.ordered!r}\nis  {now.ordered!r}"
                )
        if self.product.is_current(instance.number, held.offset) and not now.same(held, in_order):
            self.fail(instance, f"a tag of {held.offset} is called current\nwas {held.ordered!r}\nis  {now.ordered!r}")
        if self.random.random() < 0.5:
            instance.held = now

    def _agree(self, instance: Instance, changes: list[tuple[int, Change]], places: Places, routed: Routed) -> None:
        assert instance.analysis is not None
        for offset, change in changes:
            ours, truth = (
                places[offset] is not None,
                self.judge.matters(change, instance.analysis, instance.args) is not None,
            )
            if truth and not ours:
                self.fail(
                    instance, f"the judge says that {changes_text([(offset, change)])} matters, the matcher does not"
                )
            self.counts["wider than the judge"] += ours and not truth
            self.counts["matched"] += truth
            if (found := routed.get((offset, instance.number))) != places[offset]:
                self.fail(
                    instance, f"the router says {found}, not {places[offset]}, of {changes_text([(offset, change)])}"
                )

    def _count(
        self, changes: list[tuple[int, Change]], analysis: Analysis, matters: bool, passed: bool, changed: bool
    ) -> None:
        """Count per step the invalidations at table level, our invalidations and the real changes."""
        tables = set(analysis.tables)
        by_table = any(change.table.name in tables for _, change in changes)
        self.counts["pairs"] += bool(changes)
        self.counts["really changed"] += changed
        self.counts["invalidated at table level"] += by_table
        self.counts["invalidated"] += matters
        self.counts["invalidated past guards"] += passed
        self.counts["false at table level"] += by_table and not changed
        self.counts["false"] += matters and not changed
        self.counts["false past guards"] += passed and not changed


def accepts(db: apsw.Connection, sql: str) -> bool:
    """Return whether SQLite prepares `sql` as a single statement that only reads."""
    try:
        db.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()  # EXPLAIN alone does not look for a newer schema
        db.execute(f"EXPLAIN {sql}", apsw._null_bindings).fetchall()  # type: ignore[attr-defined]
    except apsw.Error:
        return False
    return True


def _attempt(session: Session, sql: str) -> None:
    with contextlib.suppress(HeadwaterError):
        session.execute(sql)


def changes_text(changes: list[tuple[int, Change]]) -> str:
    return "; ".join(
        f"{offset}: {change.op.word} {change.table.name} {change.before} -> {change.after}"
        for offset, change in changes
    )
