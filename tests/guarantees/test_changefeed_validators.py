"""Each rule of the change feed's validator passes good journals and catches a broken one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.guarantees.changefeed_validators import (
    CHECKPOINT,
    OPEN,
    RANGE,
    STEADY,
    VALUE,
    ZERO,
    Entry,
    Spec,
    Ts,
    truth_of,
    validate,
)

from headwater.model.change import Change, Op, Transaction
from headwater.model.keys.key import encode_key
from headwater.model.table import Column, Table

T = Table("t", (Column("k", "i64"), Column("v", "str")), ("k",))
U = Table("u", (Column("k", "i64"), Column("v", "str")), ("k",))
KEY = [encode_key((k,)) for k in range(10)]


def insert(k: int, v: str, table: Table = T) -> Change:
    return Change(Op.INSERT, table, None, (k, v))


def history(*transactions: tuple[Change, ...]) -> list[Transaction]:
    found, first = [], 1
    for place, changes in enumerate(transactions):
        found.append(Transaction(str(first), changes, first, ts=(10 + place) << 16))
        first += len(changes)
    return found


TRUTH = truth_of(
    history(
        (insert(1, "a"), insert(2, "a"), insert(1, "z", U)),
        (Change(Op.UPDATE, T, (1, "a"), (1, "b")), Change(Op.UPDATE, T, (1, "b"), (1, "c"))),
        (Change(Op.UPDATE, T, (2, "a"), (3, "a")),),
        (Change(Op.DELETE, T, (1, "c")),),
        (Change(Op.TRUNCATE, U),),
        (insert(1, "again"), insert(4, "y", U)),
    )
)
WHOLE = Spec()
NARROW = Spec((("t", KEY[1], KEY[3]), ("t", KEY[3], KEY[4]), ("u", b"", b"")), with_diff=False)


def journal_of(spec: Spec, *, every: int = 1, again_after: int = 4) -> list[Entry]:
    """Return the journal of a correct server: checkpoints after every `every` transactions, and one reconnect."""
    told = [each for true in TRUTH for each in spec.expected_entries(true)]
    told = [each if spec.with_diff else each._replace(prev=None) for each in told]
    times = sorted({each.ts for each in TRUTH})
    resolved = ZERO

    def stream(base: Ts, upto: Ts) -> list[Entry]:
        nonlocal resolved
        found = [Entry(OPEN, base)]
        for number, ts in enumerate(each for each in times if base < each <= upto):
            found += [each for each in told if each.ts == ts]
            if number == 0:
                found.append(Entry(STEADY))
            if number % every == every - 1 or ts == times[-1]:
                resolved = ts
                found += [Entry(CHECKPOINT, ts, span=span) for span in (*spec.spans, None)]
        return found

    first = stream(ZERO, times[again_after])
    return first + stream(resolved, times[-1])


GOOD = [(spec, journal_of(spec, every=every)) for spec in (WHOLE, NARROW) for every in (1, 2, 3)]


@pytest.mark.parametrize("place", range(len(GOOD)))
def test_valid_journal_passes_the_validator(place: int) -> None:
    spec, journal = GOOD[place]
    assert any(each.kind == RANGE for each in journal)
    assert validate(journal, spec, TRUTH) == []


def _values(journal: list[Entry]) -> list[int]:
    return [place for place, each in enumerate(journal) if each.kind == VALUE]


def _versions_of(journal: list[Entry], k: int) -> list[int]:
    return [place for place in _values(journal) if journal[place].keyed == ("t", KEY[k])]


def swapped(journal: list[Entry]) -> None:
    """Swap two versions of a key."""
    one, other = _versions_of(journal, 1)[1:3]
    journal[one], journal[other] = journal[other], journal[one]


def lost(journal: list[Entry]) -> None:
    del journal[_versions_of(journal, 1)[2]]  # in between: the rows come out right in the end


def lost_range(journal: list[Entry]) -> None:
    journal[:] = [each for each in journal if each.kind != RANGE]


def late(journal: list[Entry]) -> None:
    """Move a version behind the checkpoint that excludes it."""
    entry = journal.pop(_values(journal)[0])
    place = next(place for place, each in enumerate(journal) if each.kind == CHECKPOINT and each.span is None)
    journal.insert(place + 1, entry)


def other_value(journal: list[Entry]) -> None:
    place = _values(journal)[0]
    journal[place] = journal[place]._replace(value={"k": 1, "v": "other"})


def other_twice(journal: list[Entry]) -> None:
    """Repeat a version with another value."""
    place = _values(journal)[0]
    journal.insert(place + 1, journal[place]._replace(value={"k": 1, "v": "other"}))


def other_before(journal: list[Entry]) -> None:
    place = _versions_of(journal, 1)[1]
    journal[place] = journal[place]._replace(prev={"k": 1, "v": "other"})


def other_key(journal: list[Entry]) -> None:
    place = _values(journal)[0]
    journal[place] = journal[place]._replace(key=KEY[2])


def other_time(journal: list[Entry]) -> None:
    place = _values(journal)[0]
    journal[place] = journal[place]._replace(ts=(10, 1))


def invented(journal: list[Entry]) -> None:
    journal.insert(1, Entry(VALUE, (9, 0), 1, "t", KEY[7], {"k": 7, "v": "x"}))


def went_back(journal: list[Entry]) -> None:
    places = [place for place, each in enumerate(journal) if each.kind == CHECKPOINT]
    journal[places[-1]] = journal[places[-1]]._replace(ts=(1, 0))


def unresolved(journal: list[Entry]) -> None:
    """Remove the checkpoints after the last version."""
    while journal[-1].kind == CHECKPOINT:
        journal.pop()


def too_early(journal: list[Entry]) -> None:
    """Raise a checkpoint above versions that arrive later."""
    place = next(place for place, each in enumerate(journal) if each.kind == CHECKPOINT and each.span is None)
    journal[place] = journal[place]._replace(ts=TRUTH[-1].ts)


def below_base(journal: list[Entry]) -> None:
    place = max(place for place, each in enumerate(journal) if each.kind == OPEN)
    journal.insert(place + 1, journal[_values(journal)[0]])


def gap_in_repeats(journal: list[Entry]) -> None:
    """Leave a version out of a repeated run."""
    place = max(place for place, each in enumerate(journal) if each.kind == OPEN)
    journal[place] = Entry(OPEN, ZERO)
    first = [each for each in journal[:place] if each.kind in (VALUE, RANGE)]
    journal[place + 1 : place + 1] = [*first[:2], *first[3:]]


def outside(journal: list[Entry]) -> None:
    journal.insert(1, Entry(VALUE, TRUTH[0].ts, 1, "w", KEY[1], {"k": 1, "v": "a"}))


MUTANTS: list[tuple[Callable[[list[Entry]], None], str]] = [
    (swapped, "Order"),
    (other_twice, "Order"),
    (gap_in_repeats, "Order"),
    (late, "Resolved"),
    (went_back, "Resolved"),
    (unresolved, "Resolved"),
    (below_base, "Resolved"),
    (too_early, "Resolved"),
    (other_value, "BeforeAfter"),
    (other_time, "BeforeAfter"),
    (invented, "BeforeAfter"),
    (other_key, "KeyInValue"),
    (lost, "Fingerprint"),
    (lost_range, "Fingerprint"),
    (invented, "Fingerprint"),
    (too_early, "Fingerprint"),
]


@pytest.mark.parametrize("mutant, rule", MUTANTS, ids=lambda each: each if isinstance(each, str) else each.__name__)
def test_broken_journal_is_reported_by_its_rule(mutant: Callable[[list[Entry]], None], rule: str) -> None:
    for spec, good in GOOD[:4:3]:
        journal = list(good)
        mutant(journal)
        assert journal != good
        found = validate(journal, spec, TRUTH)
        assert any(text.startswith(rule) for text in found), found


def test_wrong_or_unrequested_before_image_is_reported() -> None:
    for spec, good in GOOD[:4:3]:
        journal = list(good)
        other_before(journal)
        assert any(text.startswith("BeforeAfter") for text in validate(journal, spec, TRUTH))


def test_unrequested_key_in_a_journal_is_reported() -> None:
    journal = list(GOOD[3][1])
    outside(journal)
    assert any(text.startswith("KeyInValue") for text in validate(journal, NARROW, TRUTH))


def test_checkpoint_ahead_of_its_span_is_reported() -> None:
    journal = list(GOOD[3][1])
    place = next(place for place, each in enumerate(journal) if each.kind == CHECKPOINT)
    journal[place] = journal[place]._replace(ts=(1, 0))
    assert any(text.startswith("Resolved") for text in validate(journal, NARROW, TRUTH))
