"""The sketch against the true last relevant change: never below it, and exact without shared slots."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from tests.queries.dependencies.bound_tables import TABLES, analysis, args, change, query
from tests.sources.memory_source import MemorySource

from headwater.model.change import Change, Op
from headwater.model.dependencies.dependency import AllOf, Comparison, Const, Dependency, Param
from headwater.queries.dependencies.bound_dependencies import BoundDependencies, bind
from headwater.queries.dependencies.change_sketch import Sketch

SOURCE = MemorySource("m")
T = TABLES["t"]


@pytest.mark.slow
@pytest.mark.parametrize("slots, most, odd", [(1, 2, 0.1), (7, 3, 0.1), (4_096, 256, 0.0), (64, 256, 0.5)])
def test_sketch_is_never_below_the_last_relevant_change(slots: int, most: int, odd: float) -> None:
    below = 0  # how often it could tell that an older answer stands
    for seed in range(60):
        rng = random.Random(seed)
        start = rng.randrange(1_000)
        sketch = Sketch(start, slots=slots, most=most)
        last = {bind(SOURCE, TABLES, query(rng), args(rng)): 0 for _ in range(12)}
        for offset in range(start + 1, start + 60):
            made = change(rng, odd=odd)
            sketch.apply(offset, made)
            last.update({bound: offset for bound in last if bound.matters(made) is not None})
            for bound in rng.sample(list(last), 3):
                version = sketch.version(bound)
                assert last[bound] <= version <= offset, (seed, offset)
                below += version < offset
            assert len(sketch) <= most, seed
    assert below > 100


def keyed(number: int) -> BoundDependencies:
    both = AllOf((Comparison("a", "eq", (Param("p"),)), Comparison("d", "gt", (Const(0),))))
    return bind(SOURCE, TABLES, analysis(Dependency("t", frozenset({"a", "d"}), both)), {"p": number})


def test_different_keys_have_different_slots() -> None:
    sketch = Sketch(10)
    assert sketch.version(keyed(1)) == 10
    sketch.apply(11, Change(Op.INSERT, T, None, (1, 1, 0, 0, 0)))
    sketch.apply(12, Change(Op.UPDATE, T, (1, 2, 0, 0, 0), (1, 3, 0, 0, 0)))
    sketch.apply(13, Change(Op.UPDATE, T, (1, 4, 0, 0, 0), (1, 4, "x", 0, 0)))
    assert [sketch.version(keyed(number)) for number in range(6)] == [10, 11, 12, 12, 10, 10]
    assert len(sketch) == 1
    sketch.apply(14, Change(Op.TRUNCATE, T))
    assert sketch.version(keyed(5)) == 14


def test_record_recreated_after_eviction_has_the_newest_offset() -> None:
    sketch = Sketch(10, most=1)
    assert sketch.version(keyed(1)) == 10
    sketch.apply(11, Change(Op.INSERT, T, None, (1, 9, 0, 0, 0)))
    assert sketch.version(keyed(1)) == 10
    sketch.version(bind(SOURCE, TABLES, analysis(Dependency("u")), {}))
    assert sketch.version(keyed(1)) == 11


def test_slots_are_the_same_in_every_process() -> None:
    program = (
        "from tests.queries.dependencies.test_change_sketch import *\n"
        "sketch = Sketch(0, slots=50)\n"
        "sketch.version(keyed(0))\n"
        "[sketch.apply(n, Change(Op.INSERT, T, None, (1, n, 0, 0, 0))) for n in range(1, 40)]\n"
        "print([sketch.version(keyed(n)) for n in range(60)])\n"
    )
    said = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout for _ in "ab"
    }
    assert len(said) == 1 and said != {""}
