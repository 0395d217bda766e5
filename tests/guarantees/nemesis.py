"""The nemesis: writers, readers on every transport, watchers of queries and bad subscribers over one database, and
faults.

Servers are killed, ended, paused and more, as the world of the database defines. Afterwards the log is checked against
the tables and the answers to writers, and every reader's journal against the log.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time

from tests.guarantees.bad_subscribers import Pests
from tests.guarantees.fault_driver import FaultDriver
from tests.guarantees.feed_journal import CHANGE
from tests.guarantees.feed_oracle import Base, Expected, Spec, Truth
from tests.guarantees.feed_reader import GIVE_UP, Reader
from tests.guarantees.feed_readers import KINDS
from tests.guarantees.feed_specs import specs
from tests.guarantees.feed_validators import validate
from tests.guarantees.nemesis_database import Rows, World
from tests.guarantees.server_process import Asking, Gone, Refused
from tests.guarantees.validators import Atomic, Durable, NeverRewritten, Ordered, placed
from tests.guarantees.watchers import WATCHERS, validate_watcher
from tests.suite.deadlines import PATIENCE

from headwater.model.change import Transaction
from headwater.model.clock import parse_ts


class Nemesis(FaultDriver):
    """One run of one world."""

    def __init__(self, world: World, *, rounds: int = 4, more_readers: int = 0) -> None:
        super().__init__(world.seed, world.random)
        self.world, self.rounds, self.quota, self.patience = world, rounds, world.quota, world.patience
        self.server, self.history, self.recorder = world.server, world.history, world.recorder
        self.rewritten = NeverRewritten()
        self.generation = ""
        self.pests = Pests(self.server, random.Random(f"{world.seed}-pests"))
        readers = world.readers + more_readers
        chosen = [world.fit(spec) for spec in specs(self.random, readers, world.wheres)] if readers else []
        chosen += [self._watched() for _ in range(world.watchers)]
        self.readers = [self._reader(place, spec) for place, spec in enumerate(chosen)]
        self._stop = threading.Event()

    def _watched(self) -> Spec:
        table, columns, condition = self.random.choice(self.world.watched)
        query = f"SELECT {columns} FROM {table} WHERE {condition} ORDER BY id"
        transport, names = self.random.choice(list(WATCHERS)), tuple(columns.split(", "))
        return Spec(transport=transport, tables=(table,), columns=names, condition=condition, query=query)

    def _reader(self, place: int, spec: Spec) -> Reader:
        kinds = WATCHERS if spec.query else KINDS
        found = kinds[spec.transport](
            self.server, spec, random.Random(f"{self.world.seed}-reader-{place}"), f"r{place}"
        )
        found.trusts_time, found.tables = self.world.trusts_time, self.world.tables
        found.has_others = self.world.has_others
        return found

    def _run(self) -> None:
        self.world.prepare()
        writers = [threading.Thread(target=run, args=(self._stop,)) for run in self.world.writers()]
        readers = [threading.Thread(target=reader.run, name=reader.name) for reader in self.readers]
        if readers:
            self.recorder.start()
        for thread in (*writers, *readers):
            thread.start()
        if self.world.pests:
            self.pests.start()
        self.world.begin()
        try:
            self.drive(self.world.events(self.rounds))
        finally:
            self.world.leave()
            self._stop.set()
            if self.world.pests:
                self.pests.stop()
            for thread in writers:
                thread.join()
            self._finish(readers)
        rows = self.world.rows()
        self.server.stop()
        begin = time.monotonic()
        self._judge(rows)
        print(f"  judged in {time.monotonic() - begin:.0f} s")

    @property
    def done(self) -> int:
        """Return the number of acknowledged writes."""
        return self.history.codes["ok"]

    def happen(self, event: str) -> None:
        self.world.happen(event)

    def check(self) -> None:
        self._read_the_log()

    def last_words(self) -> str:
        return f"codes: {dict(self.history.codes)}\nserver: {self.server.last_words()[-2000:]}"

    def close(self, *, keep: bool = False) -> None:
        self.world.close(keep=keep)

    # --- the end -------------------------------------------------------------------------------------------------

    def _finish(self, readers: list[threading.Thread]) -> None:
        """Commit one last change, then let every reader read to the end."""
        goal = GIVE_UP
        try:
            self.world.say_last()
            goal = self._goal()
        finally:
            for reader in self.readers:
                reader.finish(goal)
            end = time.monotonic() + PATIENCE
            for reader, thread in zip(self.readers, readers, strict=True):
                thread.join(max(end - time.monotonic(), 0.1))
                if thread.is_alive():
                    reader.defects.append(f"did not reach {goal}: it is at {reader.last}, {reader.pressure}")
                    reader.finish(GIVE_UP)
                    thread.join()
            if readers:
                self.recorder.stop()

    def _goal(self) -> int:
        """Return the newest offset, once the log holds the last change."""
        ask, end = Asking(self.server), time.monotonic() + PATIENCE
        try:
            while True:
                with contextlib.suppress(Gone, Refused):
                    found = ask("stats.snapshot")
                    state = found["databases"]["main"]
                    if state["lag_changes"] == 0 and not state.get("error") and _has_last(self.recorder.tail()):
                        return int(found["cdc"]["latest_offset"])
                assert time.monotonic() < end, "the log does not catch up"
                time.sleep(0.05)  # asking again at once would only keep it from working
        finally:
            ask.close()

    # --- judgement -----------------------------------------------------------------------------------------------

    def _read_the_log(self) -> list[Transaction]:
        """Read the log as another process; check that nothing read before has changed."""
        generation, newest, parts = self.recorder.whole()
        if self.world.is_one_history:
            self.generation = self.generation or generation
            assert generation == self.generation, "a needless new generation"
        self.rewritten.note_reading(placed(parts), newest)
        return parts

    def _judge(self, rows: Rows) -> None:
        kept = self._read_the_log()
        parts, truth = self.recorder.parts if self.readers else kept, None
        failures = [self.recorder.failure] if self.recorder.failure else []
        failures += self.history.defects[:10] + self._judge_log(parts)
        if "Traceback" in (said := self.server.said.read_text(errors="replace")):
            failures.append("the server met what it did not expect: " + said[said.index("Traceback") :][:3000])
        if self.readers:
            truth = Truth(parts, self.world.bases, added=self.world.added)
            for entry in (entry for reader in self.readers for entry in reader.journal if entry.kind == CHANGE):
                truth.note_told(entry.offset, parse_ts(entry.body["ts"]))
            failures += self._judge_tables(truth, rows)
            failures += [text for reader in self.readers for text in self._judge_reader(reader, truth)]
        failures += self.world.judge(parts, truth)
        if failures:  # kept with the journals, should the run be cut off before it is told
            (self.world.folder / "failures").write_text("\n".join(failures))
        assert not failures, "\n".join(failures)
        entries = sum(len(reader.journal) for reader in self.readers)
        losses = sum(len(reader.losses) for reader in self.readers)
        print(f"seed {self.seed}: to {parts[-1].upto}, {entries} entries, {losses} losses; {self.events}")
        print(f"  {dict(self.history.codes)}; {dict(self.pests.counts)}")
        least = self.quota[0] * (len(self.events) + 1)
        assert self.done >= least and entries >= 1000 * bool(self.readers), "too little happened"

    def _judge_log(self, parts: list[Transaction]) -> list[str]:
        """Check order, whole transactions and the answers to writers, by the log alone."""
        if not self.world.is_one_history:
            return self.rewritten.failures
        changes, durable, atomic, ordered = placed(parts), Durable(), Atomic(), Ordered()
        ordered.check(changes, first=1 if self.world.keeps_all else None)
        atomic.check_parts(parts)
        oldest = {} if self.world.keeps_all else {changes[0].mark}  # retention may have cut into this one
        for mark, size in self.history.acknowledged.items():
            if mark not in oldest:
                atomic.note_size(mark, size)
        atomic.check(changes)
        if self.world.keeps_all:
            self._judge_durable(durable, [each.mark for each in changes if each.mark is not None])
        return [text for each in (self.rewritten, ordered, atomic, durable) for text in each.failures]

    def _judge_durable(self, durable: Durable, marks: list[str]) -> None:
        for mark, size in self.history.acknowledged.items():
            durable.note_acknowledged(mark, size)
        for mark in (*self.history.refused, "never"):
            durable.note_refused(mark)
        for mark in marks:
            durable.note_found(mark)
        durable.check()

    def _judge_tables(self, truth: Truth, rows: Rows) -> list[str]:
        """Check that the log folds to the rows of the tables."""
        whole, base = truth.whole("objects_json"), Base(truth.latest, dict(rows))
        wanted = Expected(Truth([], [*truth.bases, base]), Spec(), tables=whole.tables).state(truth.latest)
        mine = {key: str(image) for key, image in whole.state(truth.latest).items() if key[0] in rows}
        theirs = {key: str(image) for key, image in wanted.items()}
        odd = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
        one = odd[0] if odd else ("", "")
        text = f"{len(odd)} rows differ; {one} is {mine.get(one)} in the log, {theirs.get(one)} in fact"
        return [text] if odd else []

    def _judge_reader(self, reader: Reader, truth: Truth) -> list[str]:
        spec, found = reader.spec, reader.defects[:5]
        if not self.world.may_lose:
            found += [f"lost: {reason}" for reason in reader.losses]
        if spec.query:
            found += validate_watcher(reader.journal, Expected(truth, spec))
        else:
            streams, refused = spec.transport not in ("poll", "long_poll"), self.history.refused | {"never"}
            found += validate(reader.journal, Expected(truth, spec), refused, reader.goal, streams=streams)
        if not found:
            return []
        lines = [f"{each.time:.3f} {each.kind} {each.offset} {str(each.body)[:200]}" for each in reader.journal]
        (self.world.folder / f"{reader.name}.journal").write_text("\n".join(lines))
        return [f"{reader.name} {spec} losses {reader.losses}:\n  " + "\n  ".join(found[:12])]


def _has_last(tail: list[Transaction]) -> bool:
    return any(change.after and change.after[0] == "last" for part in tail for change in part.changes)
