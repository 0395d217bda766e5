"""The guarantees of feeds as validators: each checks the journal of one reader against the truth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tests.guarantees.feed_journal import (
    BEGIN,
    CAUGHT_UP,
    CHANGE,
    CHECKPOINT,
    LOADED,
    REACHED,
    ROW,
    ROWS,
    Entry,
    Step,
    walk,
)
from tests.guarantees.feed_oracle import ENDS, Expected, Keyed, dumps
from tests.guarantees.validators import Validator

from headwater.model.clock import parse_ts

SETTLED = ("op", "table", "pk", "pk_before", "before", "after", "ddl")  # the rest may change once, by a crash
LACKS = {"t": "unavailable"}
MARKS = (REACHED, CAUGHT_UP, CHECKPOINT)  # "everything up to here"


class FeedValidator(Validator):
    """A rule that checks every step of a journal."""

    def check(self, journal: list[Entry], expected: Expected) -> None:
        """Check every step of the journal."""
        for step in walk(journal):
            self.step(step, expected)

    def step(self, step: Step, expected: Expected) -> None:
        """Check one entry."""
        raise NotImplementedError


class OrderedFeed(FeedValidator):
    """Offsets increase in a session; changes repeat only in a session that began at an older cursor, with equal
    content.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, str] = {}

    def step(self, step: Step, expected: Expected) -> None:
        entry = step.entry
        if entry.kind != CHANGE:
            return
        if step.at is None:
            self.fail(f"{entry.offset} came among the rows of a snapshot")
        elif entry.offset <= step.at:
            self.fail(f"{entry.offset} follows {step.at}")
        content = dumps({name: entry.body.get(name) for name in SETTLED})
        if step.exact and self._seen.setdefault(entry.offset, content) != content:
            self.fail(f"{entry.offset} was {self._seen[entry.offset]} and is now {content}")


class Complete(FeedValidator):
    """Every change that passes the filter is delivered, or the reader is told to take a snapshot."""

    resumed = False  # gaps at the beginning of a session are another validator's

    def step(self, step: Step, expected: Expected) -> None:
        entry, truth = step.entry, expected.truth
        if step.at is None or step.is_first != self.resumed or entry.kind not in (CHANGE, *MARKS):
            return
        upto = entry.offset - (entry.kind == CHANGE)
        if step.exact and (missed := expected.between(step.at, upto)):
            self.fail(
                f"{len(missed)} changes were skipped after {step.at} before {entry.kind} {entry.offset}: {missed[:5]}"
            )
        if truth.generation(step.at) != truth.generation(entry.offset):
            self.fail(f"{entry.offset} of another generation follows {step.at}, and nobody said so")


class Resumable(Complete):
    """A reader that resumes from the last id it received continues right after it."""

    resumed = True

    def step(self, step: Step, expected: Expected) -> None:
        super().step(step, expected)
        if step.entry.kind == BEGIN and step.at is not None and step.entry.offset > max(step.high, step.at):
            self.fail(f"the reader went on at {step.entry.offset}, having seen up to {step.high}: a broken test")


class Arrived(Validator):
    """Every reader reaches the end."""

    def check(self, journal: list[Entry], expected: Expected, goal: int) -> None:
        """Check that the reader received everything up to `goal`, the newest offset."""
        high = max((step.high for step in walk([*journal, Entry(REACHED)])), default=0)
        if high < goal and expected.between(high, goal):
            self.fail(f"the reader is at {high}, the log at {goal}")


class AtomicFeed(FeedValidator):
    """Changes of a transaction are contiguous and numbered; neither a checkpoint nor a whole page ends inside one."""

    def __init__(self) -> None:
        super().__init__()
        self._txn: tuple[str, int, bool] | None = None  # the newest of this session: id, seq, last
        self._over: set[str] = set()
        self._begin = 0

    def step(self, step: Step, expected: Expected) -> None:
        entry, truth = step.entry, expected.truth
        if entry.kind in (BEGIN, ROWS, LOADED):
            self._txn, self._over, self._begin = None, set(), entry.offset
        elif entry.kind == CHANGE:
            self._take(entry, expected)
        elif entry.kind == REACHED and expected.spec.atomic and (split := self._split(entry.offset, expected)):
            self.fail(f"the page that ends with {entry.offset} splits the transaction of {split}")
        if entry.kind == CHECKPOINT and not truth.ends_transaction(entry.offset):
            self.fail(f"checkpoint {entry.offset} lies inside a transaction")
        if entry.kind == CHECKPOINT and self._txn is not None and step.at is not None and entry.offset < step.at:
            self.fail(f"checkpoint {entry.offset} comes after {step.at}")

    def _split(self, offset: int, expected: Expected) -> list[int]:
        """Return the passing offsets of the transaction around `offset` if some come before and some after, else []."""
        truth = expected.truth
        if offset <= self._begin or truth.ends_transaction(offset):
            return []
        id = truth.by_offset[offset].part.id
        passing = [each for each in expected.offsets if truth.by_offset[each].part.id == id]
        return passing if passing and passing[0] <= offset < passing[-1] else []

    def _take(self, entry: Entry, expected: Expected) -> None:
        txn = entry.body["txn"]
        seen = expected.truth.by_offset.get(entry.offset)
        if seen is None:
            return self.fail(f"{entry.offset} was never committed: {dumps(entry.body)[:300]}")
        settled = expected.truth.is_settled(entry.offset, parse_ts(entry.body["ts"]))
        if settled and txn != {"id": seen.part.id, "seq": seen.place, "last": seen.last}:
            self.fail(f"{entry.offset} says {txn} of its transaction, not {seen.part.id} {seen.place} {seen.last}")
        before = self._txn
        if before is not None and before[0] != txn["id"]:
            self._over.add(before[0])
        elif before is not None and (before[2] or txn["seq"] <= before[1]):
            self.fail(f"{entry.offset}: {txn} follows {before} of the same transaction")
        if txn["id"] in self._over:
            self.fail(f"{entry.offset} goes on with transaction {txn['id']} after another one")
        self._txn = (txn["id"], txn["seq"], txn["last"])
        return None


class NeverRolledBack(Validator):
    """No reader receives a row of a transaction that its client was told was rolled back."""

    def check(self, journal: Iterable[Entry], refused: set[str]) -> None:
        """Look for rows that carry the mark of a refused transaction."""
        for entry in journal:
            images = entry.body if isinstance(entry.body, dict) and entry.kind in (CHANGE, ROW) else {}
            mark = (images.get("after") or {}).get("mark")
            mark = mark.get("v") if isinstance(mark, dict) else mark
            if mark in refused:
                self.fail(f"{entry.kind} {entry.offset} is of {mark}, which was rolled back")


class Filtered(FeedValidator):
    """A filter passes exactly the changes that the database says, with the op as seen inside the filter."""

    def step(self, step: Step, expected: Expected) -> None:
        entry = step.entry
        if entry.kind == ROW:
            self._row(entry, expected)
        if entry.kind != CHANGE:
            return
        wanted = expected.bodies.get(entry.offset)
        if wanted is None:
            self.fail(f"{entry.offset} does not pass: {dumps(entry.body)[:300]}")
        elif step.exact and (entry.body["op"], set(entry.body)) != (wanted["op"], set(wanted)):
            self.fail(f"{entry.offset} is {entry.body['op']} {sorted(entry.body)}, not {wanted['op']} {sorted(wanted)}")

    def _row(self, entry: Entry, expected: Expected) -> None:
        if expected.image(key_of(entry.body), entry.offset) is None:
            self.fail(f"a row that does not pass, or is not there at {entry.offset}: {dumps(entry.body)[:300]}")


class TrueImages(FeedValidator):
    """Images are the row just before and just after a change, and all its other fields are correct."""

    def step(self, step: Step, expected: Expected) -> None:
        entry = step.entry
        if entry.kind == ROW:
            self._row(entry, expected)
        if entry.kind == LOADED:
            self._tables(entry, expected)
        if entry.kind != CHANGE or (wanted := expected.bodies.get(entry.offset)) is None:
            return
        if not step.exact:
            wanted = halved(wanted, entry.body["op"])
        settled = expected.truth.is_settled(entry.offset, parse_ts(entry.body["ts"]))
        for name in set(wanted) | set(entry.body):
            if dumps(entry.body.get(name)) != dumps(wanted.get(name)) and (settled or name in SETTLED):
                self.fail(f"{entry.offset}: {name} is {dumps(entry.body.get(name))}, not {dumps(wanted.get(name))}")

    def _row(self, entry: Entry, expected: Expected) -> None:
        image = expected.image(key_of(entry.body), entry.offset)
        if image is not None and dumps(image) != dumps(entry.body["after"]):
            self.fail(f"at {entry.offset} the row is {dumps(image)}, not {dumps(entry.body['after'])}")

    def _tables(self, entry: Entry, expected: Expected) -> None:
        """Compare whole tables loaded by URL, which no filter applies to."""
        for name, rows in entry.body.items():
            found = sorted(map(dumps, rows))
            whole = expected.truth.whole(expected.spec.format).state(entry.offset)
            wanted = sorted(dumps(image) for (table, _), image in whole.items() if table == name)
            if found != wanted:
                odd = sorted(set(found) ^ set(wanted))[:3]
                self.fail(f"{name} at {entry.offset} has {len(wanted)} rows, its snapshot {len(found)}: {odd}")


class CheckpointTrue(FeedValidator):
    """After a checkpoint no new change is as old as it; checkpoints never decrease, and each is true."""

    def __init__(self) -> None:
        super().__init__()
        self._newest = 0  # over all sessions
        self._last = 0  # of this session
        self._change = 0  # the newest time of a change in it
        self._seen: set[int] = set()

    def step(self, step: Step, expected: Expected) -> None:
        entry = step.entry
        if entry.kind in (BEGIN, ROWS):
            self._last = self._change = 0
        elif entry.kind == LOADED:
            self._seen.clear()
        elif entry.kind == CHANGE:
            ts = parse_ts(entry.body["ts"])
            if ts <= self._last or (entry.offset not in self._seen and step.exact and ts <= self._newest):
                self.fail(f"{entry.offset} of {ts} came after a checkpoint of {max(self._last, self._newest)}")
            self._seen.add(entry.offset)
            self._change = ts
        elif entry.kind == CHECKPOINT:
            if entry.ts < self._last:
                self.fail(f"checkpoint {entry.ts} follows {self._last}")
            self._check(entry, expected)
            self._last = entry.ts
            self._newest = max(entry.ts, self._newest)

    def _check(self, entry: Entry, expected: Expected) -> None:
        after = expected.truth.by_offset.get(entry.offset + 1)
        if entry.ts < self._change:
            self.fail(f"checkpoint {entry.offset} has the time {entry.ts}, below {self._change} of a change before it")
        if after is not None and after.part.ts <= entry.ts:
            self.fail(f"checkpoint {entry.offset} of {entry.ts}: {after.offset} after it is of {after.part.ts}")

    def check_end(self, journal: list[Entry], goal: int) -> None:
        """Check that a checkpoint follows the last change, and that checkpoints advance while idle."""
        found = [entry.ts for entry in journal if entry.kind == CHECKPOINT and entry.offset >= goal]
        if not found:
            self.fail(f"no checkpoint ever came for {goal}")
        elif len(set(found)) < 2:
            self.fail(f"idle checkpoints at {goal} stood still: {found[:3]}")


class Folded(FeedValidator):
    """The received changes fold to the table under the filter whenever the reader is told that it is up to date."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[Keyed, Any] = {}
        self._void: set[str] = set()  # tables of which it was told to read them again
        self._knows = False
        self._equal_at: int | None = None  # where all rows were compared; None: nowhere since they were set anew
        self._dirty: set[Keyed] = set()  # rows it was told of since
        self.checks = 0

    def step(self, step: Step, expected: Expected) -> None:
        entry = step.entry
        if not expected.spec.folds:
            return
        if entry.kind not in (CHANGE, *MARKS):
            self._equal_at = None
        match entry.kind:
            case "begin" if not self._knows:  # it begins with what is there
                self._load(entry.offset, expected)
            case "loaded":
                self._load(entry.offset, expected)
            case "rows" | "restart":
                self._rows = self._rows if entry.kind == ROWS and self._knows and not step.exact else {}
                self._knows = True
            case "row":
                self._rows[key_of(entry.body)] = entry.body["after"]
            case "change" if not step.exact:
                self._upsert(entry.body, expected)
            case "change" if entry.offset > step.high:
                self._apply(entry.body, expected)
            case "caught_up" if not step.exact:
                self._compare(entry, expected)
            case "reached" | "caught_up" | "checkpoint" if step.exact and entry.offset >= step.high:
                self._compare(entry, expected)

    def _load(self, offset: int, expected: Expected) -> None:
        self._rows, self._void, self._knows = expected.state(offset), set(expected.void_at(offset)), True

    def _upsert(self, body: dict[str, Any], expected: Expected) -> None:
        self._equal_at = None
        if body["op"] in ("schema_change", "truncate"):
            return self._reshape(body, expected)
        held: Any = None
        for key in keys_of(body)[::-1]:
            held = self._rows.pop(key, held)
        if body["op"] != "delete":
            self._rows[key_of(body)] = filled(body["after"], held)
        return None

    def _apply(self, body: dict[str, Any], expected: Expected) -> None:
        if body["op"] in ("schema_change", "truncate"):
            self._reshape(body, expected)
            return
        if body["table"] in self._void:
            return
        old, new = keys_of(body)
        self._dirty |= {old, new}
        held = self._rows.pop(old, None)
        if body["op"] == "insert":
            if held is not None:
                self.fail(f"{body['offset']} inserts {new}, which is there")
        elif held is None:
            self.fail(f"{body['offset']} is a {body['op']} of {old}, which is not there")
        elif "before" in body and dumps(held) != dumps(filled(body["before"], held)):
            self.fail(f"{body['offset']}: before is {dumps(body['before'])}, and there was {dumps(held)}")
        if body["op"] != "delete":
            if new in self._rows:
                self.fail(f"{body['offset']} moves a row to {new}, which is there")
            self._rows[new] = filled(body["after"], held)

    def _reshape(self, body: dict[str, Any], expected: Expected) -> None:
        """Apply a schema change: add columns with the table's default, remove columns, or remove all rows."""
        table, self._equal_at = body["table"], None
        if body["op"] == "truncate" or body["resnapshot"] or ENDS.match(body["ddl"]):
            self._rows = {key: row for key, row in self._rows.items() if key[0] != table}
            self._void.discard(table)
            self._void |= {table} if body.get("resnapshot") else set()
        for key, row in self._rows.items():
            image = expected.image(key, body["offset"])
            if key[0] == table and image is not None:
                self._rows[key] = {name: row.get(name, value) for name, value in image.items()}

    def _compare(self, entry: Entry, expected: Expected) -> None:
        """Compare all rows, or only those changed on either side since the last equal comparison."""
        self.checks += 1
        if self._equal_at is None or entry.offset < self._equal_at:
            wanted = expected.state(entry.offset)
            keys = self._rows.keys() | wanted.keys()
        else:
            keys = self._dirty.union(expected.touched(self._equal_at, entry.offset))
            wanted = {key: expected.image(key, entry.offset) for key in keys}
        odd = [key for key in keys if dumps(self._rows.get(key)) != dumps(wanted.get(key))]
        self._equal_at = entry.offset
        self._dirty.clear()
        if odd:
            key = sorted(odd)[0]
            mine, theirs = dumps(self._rows.get(key)), dumps(wanted.get(key))
            self.fail(f"at {entry.kind} {entry.offset} {len(odd)} rows differ; {key} is {mine}, in the table {theirs}")
            self._rows = expected.state(entry.offset)  # one fault is told once


class Bounded(Validator):
    """A stalled reader costs the server a bounded amount of memory."""

    def check(self, *, without: int, stalled: int, readers: int, each: int = 1 << 20, noise: int = 4 << 20) -> None:
        """Compare how many bytes the server grew by, without and with `readers` stalled readers."""
        if stalled - without > readers * each + noise:
            self.fail(f"{readers} stalled readers cost {(stalled - without) / readers / (1 << 20):.2f} MiB each")


class Isolated(Validator):
    """A bad subscriber delays and loses nothing for the others."""

    def check(self, name: str, sent: Mapping[str, float], seen: Mapping[str, float], most: float = 1.5) -> None:
        """Check that the good reader `name` saw every mark at most `most` seconds after its acknowledgement."""
        lost = sorted(set(sent) - set(seen))
        if lost:
            self.fail(f"{name} never saw {len(lost)} of {len(sent)}: {lost[:3]}")
        late = {mark: seen[mark] - sent[mark] for mark in sent if mark in seen and seen[mark] - sent[mark] > most}
        if late:
            mark = max(late, key=lambda each: late[each])
            self.fail(f"{name} saw {len(late)} of {len(sent)} late, {mark} by {late[mark]:.2f} s")


def filled(image: Any, held: Any) -> Any:
    """Return an image whose unsent values are taken from the earlier row."""
    if not isinstance(held, dict):
        return image
    return {name: held.get(name) if value == LACKS else value for name, value in image.items()}


def halved(body: dict[str, Any], op: str) -> dict[str, Any]:
    """Return the insert or delete that remains of an update when a snapshot has delivered its other half."""
    if body["op"] != "update" or op not in ("insert", "delete"):
        return body
    gone = {"pk_before", "identity_before", "before" if op == "insert" else "after"}
    found = {name: value for name, value in body.items() if name not in gone} | {"op": op}
    if op == "delete":
        found |= {word: body[word + "_before"] for word in ("pk", "identity") if word + "_before" in body}
    return found


def key_of(body: dict[str, Any]) -> Keyed:
    """Return table and key of the row that a change leaves or removes."""
    return keys_of(body)[1]


def keys_of(body: dict[str, Any]) -> tuple[Keyed, Keyed]:
    """Return table and key before and after a change."""
    word = "pk" if "pk" in body else "identity"
    now, old = _values(body[word]), _values(body.get(word + "_before", body[word]))
    return (body["table"], dumps(old)), (body["table"], dumps(now))


def _values(key: Any) -> list[Any]:
    return list(key.values()) if isinstance(key, dict) else key


def validate(journal: list[Entry], expected: Expected, refused: set[str], goal: int, *, streams: bool) -> list[str]:
    """Return all violations in the journal of one reader."""
    checkpoints, rolled_back, arrived = CheckpointTrue(), NeverRolledBack(), Arrived()
    validators: list[FeedValidator] = [
        OrderedFeed(), Complete(), Resumable(), AtomicFeed(), Filtered(), TrueImages(), checkpoints, Folded()
    ]  # fmt: skip
    for validator in validators:
        validator.check(journal, expected)
    if streams:
        checkpoints.check_end(journal, goal)
    rolled_back.check(journal, refused)
    arrived.check(journal, expected, goal)
    return [text for validator in (*validators, rolled_back, arrived) for text in validator.failures]
