"""The guarantees of a change feed, as validators over the journal of one reader, after those of CockroachDB's cdctest.

A journal covers many streams: each begins with OPEN, which holds the start time. The truth is the log, read as another
process would: every version of every key, and the row before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from headwater.model.change import Op, Transaction
from headwater.model.keys.key import encode_key
from headwater.model.literal import UNAVAILABLE

OPEN, STEADY, VALUE, RANGE, CHECKPOINT = "open", "steady", "value", "range", "checkpoint"
Ts = tuple[int, int]
Keys = tuple[str, bytes, bytes]  # of a table, from, to; an empty end is none
Keyed = tuple[str, bytes]
ZERO: Ts = (0, 0)


class Entry(NamedTuple):
    """One event that a reader received. A version is identified by time, offset and key; the key of a range is its
    start.
    """

    kind: str
    ts: Ts = ZERO
    offset: int = 0
    table: str = ""
    key: bytes = b""
    value: Any = None  # None: deleted
    prev: Any = None
    span: Keys | None = None  # of a checkpoint, none: of the stream

    @property
    def keyed(self) -> Keyed:
        return self.table, self.key

    @property
    def version(self) -> tuple[Ts, int]:
        return self.ts, self.offset


class Spec(NamedTuple):
    """What a reader requested."""

    spans: tuple[Keys, ...] = ()  # none: the whole database
    with_diff: bool = True

    def wants(self, table: str, key: bytes) -> bool:
        return not self.spans or any(within(span, table, key) for span in self.spans)

    def expected_entries(self, true: Entry) -> list[Entry]:
        """Return the entries that this reader must receive for `true`: for a range, one for each of its spans."""
        if true.kind == VALUE:
            return [true] if self.wants(*true.keyed) else []
        spans = self.spans or ((true.table, b"", b""),)
        return [true._replace(key=start) for table, start, _ in spans if table == true.table]


def within(span: Keys, table: str, key: bytes) -> bool:
    name, start, end = span
    return name == table and start <= key and (not end or key < end)


def truth_of(parts: Iterable[Transaction]) -> list[Entry]:
    """Return every version in order: two for a change of a key, and a range for a statement that empties a table."""
    return [entry for part in parts for entry in _versions(part)]


def _versions(part: Transaction) -> Iterator[Entry]:
    ts = part.ts >> 16, part.ts & 0xFFFF
    for offset, change in enumerate(part.changes, part.first):
        name = change.table.name
        if change.op > Op.DELETE:
            dropped = (change.ddl or "").upper().startswith("DROP TABLE")
            if change.op is Op.TRUNCATE or dropped:
                yield Entry(RANGE, ts, offset, name)
            continue
        images: list[tuple[Any, Any]] = []
        for row in (change.before, change.after):
            if row is None:
                images.append((None, None))
                continue
            named = zip(change.table.names, row, strict=True)
            known = {name: value for name, value in named if value is not UNAVAILABLE}
            images.append((encode_key(change.table.key_of(row)), known))
        (old, before), (new, after) = images
        if old == new or old is None or new is None:
            yield Entry(VALUE, ts, offset, name, new if old is None else old, after, before)
        else:
            yield Entry(VALUE, ts, offset, name, old, None, before)
            yield Entry(VALUE, ts, offset, name, new, after, None)


class Validator:
    """A rule that reads a journal entry by entry and collects violations."""

    def __init__(self, spec: Spec, truth: Sequence[Entry]) -> None:
        self.spec, self.truth = spec, truth
        self.failures: list[str] = []

    def fail(self, text: str) -> None:
        self.failures.append(f"{type(self).__name__}: {text}")

    def note(self, entry: Entry) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Check what can be checked only after the last entry."""


class Order(Validator):
    """Versions of a key arrive in order, each with one content; repeats are a run of earlier versions without gaps."""

    def __init__(self, spec: Spec, truth: Sequence[Entry]) -> None:
        super().__init__(spec, truth)
        self._told: list[Entry] = []  # each version once
        self._at: dict[tuple[Ts, int, Keyed], int] = {}
        self._newest: dict[Keyed, tuple[Ts, int]] = {}
        self._run: int | None = None  # place of the last repeat on this stream

    def note(self, entry: Entry) -> None:
        if entry.kind == OPEN:
            self._run = None  # the stream before may have ended in the midst of its repeats
        if entry.kind not in (VALUE, RANGE):
            return
        name = (*entry.version, entry.keyed)
        place = self._at.get(name)
        if place is not None:
            self._repeated(entry, place)
            return
        if self._run is not None and self._run + 1 != len(self._told):
            self.fail(f"{name} is new, and comes in the midst of what is told again")
        if entry.version < self._newest.get(entry.keyed, (ZERO, 0)):
            self.fail(f"{name} is new, and older than {self._newest[entry.keyed]} of the same key")
        self._newest[entry.keyed] = max(entry.version, self._newest.get(entry.keyed, (ZERO, 0)))
        self._at[name] = len(self._told)
        self._told.append(entry)
        self._run = len(self._told) - 1

    def _repeated(self, entry: Entry, place: int) -> None:
        if self._told[place] != entry:
            self.fail(f"{entry} was {self._told[place]} before")
        if self._run is not None and place != self._run + 1:
            self.fail(f"{entry.version} {entry.keyed} is told again, out of its place")
        self._run = place


class Resolved(Validator):
    """No new version is at or below a checkpoint of its span; checkpoints of a stream never decrease; all versions get
    one.
    """

    def __init__(self, spec: Spec, truth: Sequence[Entry]) -> None:
        super().__init__(spec, truth)
        self._promised: dict[Keys | None, Ts] = {}
        self._here: dict[Keys | None, Ts] = {}  # on this stream
        self._base = ZERO
        self._seen: set[tuple[Ts, int, Keyed]] = set()
        self._open: list[Entry] = []  # values that no checkpoint followed

    def note(self, entry: Entry) -> None:
        if entry.kind == OPEN:
            self._here, self._base = {}, entry.ts
        elif entry.kind == CHECKPOINT:
            if entry.ts < self._here.get(entry.span, ZERO):
                self.fail(f"a checkpoint went back to {entry.ts}")
            self._here[entry.span] = entry.ts
            self._promised[entry.span] = max(entry.ts, self._promised.get(entry.span, ZERO))
            if entry.span is None:
                least = min((self._here.get(span, ZERO) for span in self.spec.spans), default=entry.ts)
                if least < entry.ts and len(self._here) > 1:
                    self.fail(f"the stream is at {entry.ts}, and a span of it at {least}")
                self._open = [each for each in self._open if each.ts > entry.ts]
        elif entry.kind in (VALUE, RANGE):
            self._value(entry)

    def _value(self, entry: Entry) -> None:
        if entry.ts <= self._base:
            self.fail(f"{entry.version} is not after the base {self._base}")
        name = (*entry.version, entry.keyed)
        for span, ts in {} if name in self._seen else self._promised.items():
            if entry.ts <= ts and (span is None or within(span, *entry.keyed)):
                self.fail(f"{name} is new, and {span} was resolved to {ts}")
        self._seen.add(name)
        self._open.append(entry)

    def finish(self) -> None:
        for entry in self._open:
            self.fail(f"no checkpoint follows {entry.version} {entry.keyed}")


class BeforeAfter(Validator):
    """A value is the row at its time, and prev_value the row just before it; without diff there is no prev_value."""

    def __init__(self, spec: Spec, truth: Sequence[Entry]) -> None:
        super().__init__(spec, truth)
        self._true = {(*each.version, each.keyed): each for each in truth if each.kind == VALUE}

    def note(self, entry: Entry) -> None:
        if entry.kind != VALUE:
            return
        true = self._true.get((*entry.version, entry.keyed))
        if true is None:
            self.fail(f"{entry} never happened")
        elif entry.value != true.value:
            self.fail(f"{entry.version} {entry.keyed} is {entry.value}, and was {true.value}")
        elif entry.prev != (true.prev if self.spec.with_diff else None):
            self.fail(f"{entry.version} {entry.keyed} was {entry.prev} before, they say; {true.prev} in truth")


class KeyInValue(Validator):
    """The key is that of the row and inside the requested spans; keys are the first column here."""

    def note(self, entry: Entry) -> None:
        if entry.kind != VALUE:
            return
        if not self.spec.wants(*entry.keyed):
            self.fail(f"{entry.keyed} was not asked for")
        for row in (entry.value, entry.prev):
            if row is not None and encode_key((row["k"],)) != entry.key:
                self.fail(f"{row} is not at {entry.key!r}")


class Fingerprint(Validator):
    """At each checkpoint the versions received up to its time are all there are, and fold to the table at that time."""

    def __init__(self, spec: Spec, truth: Sequence[Entry]) -> None:
        super().__init__(spec, truth)
        self._pending: dict[tuple[Ts, int, Keyed], Entry] = {}
        self._state: dict[Keyed, Any] = {}
        self._true: dict[Keyed, Any] = {}
        self._place, self._upto = 0, ZERO

    def note(self, entry: Entry) -> None:
        if entry.kind in (VALUE, RANGE):
            self._pending[*entry.version, entry.keyed] = entry
        if entry.kind != CHECKPOINT or entry.span is not None or entry.ts <= self._upto:
            return
        ready = {name: each for name, each in self._pending.items() if self._upto < each.ts <= entry.ts}
        self._pending = {name: each for name, each in self._pending.items() if each.ts > entry.ts}
        due = {}
        while self._place < len(self.truth) and self.truth[self._place].ts <= entry.ts:
            true = self.truth[self._place]
            self._place += 1
            due |= {(*each.version, each.keyed): each for each in self.spec.expected_entries(true)}
        for name in due.keys() - ready.keys():
            self.fail(f"{name} was not told before {entry.ts} was resolved")
        for name in ready.keys() - due.keys():
            self.fail(f"{name} never happened")
        for found, state in ((ready, self._state), (due, self._true)):
            for each in sorted(found.values(), key=lambda each: each.version):
                _apply(state, each)
        if self._state != self._true:
            odd = {key for key in self._state.keys() | self._true.keys() if self._state.get(key) != self._true.get(key)}
            self.fail(f"at {entry.ts} {sorted(odd)[:3]} are not what the table holds")
            self._state = dict(self._true)  # one fault is told once
        self._upto = entry.ts

    def rows(self, table: str) -> dict[bytes, Any]:
        """Return the rows to which the received versions of `table` fold."""
        return {key: row for (name, key), row in self._state.items() if name == table}


def _apply(state: dict[Keyed, Any], entry: Entry) -> None:
    if entry.kind == RANGE:
        for key in [key for key in state if key[0] == entry.table]:
            del state[key]
    elif entry.value is None:
        state.pop(entry.keyed, None)
    else:
        state[entry.keyed] = entry.value


RULES = (Order, Resolved, BeforeAfter, KeyInValue, Fingerprint)


def validate(journal: Sequence[Entry], spec: Spec, truth: Sequence[Entry]) -> list[str]:
    """Return the violations of all rules in the journal of one reader."""
    found: list[str] = []
    for rule in RULES:
        validator = rule(spec, truth)
        for entry in journal:
            validator.note(entry)
        validator.finish()
        found += validator.failures
    return found
