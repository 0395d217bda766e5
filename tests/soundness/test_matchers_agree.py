"""Random conditions, whatever made them: the matcher, the router and the sketch miss nothing that SQLite calls true."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from tests.soundness.differential_checker import Case, Trial, changes_text, make_case
from tests.soundness.naive_matcher import Judge
from tests.soundness.schemas import World

from headwater.model.change import Change
from headwater.model.dependencies.dependency import (
    AllOf,
    Analysis,
    AnyOf,
    Comparison,
    Condition,
    Const,
    Dependency,
    Operand,
    Param,
)
from headwater.model.table import Table
from headwater.queries.dependencies.bound_dependencies import bind
from headwater.queries.dependencies.change_sketch import Sketch
from headwater.queries.dependencies.instance_router import Router
from headwater.sources.sqlite.query.affinity import doubt

INSTANCES = 40
ARGS = 4

OPS = ("eq", "ne", "lt", "le", "gt", "ge", "is", "is_not", "in", "not_in", "between", "not_between")


class Agreement(Trial):
    """A trial with random dependencies instead of real ones: only the matchers are compared, not answers."""

    def __init__(self, seed: int, case: Case, counts: Counter[str]) -> None:
        super().__init__(case, counts, judge=Judge())
        self.random, self.world = random.Random(f"agree {seed}"), World(seed)

    def _run(self) -> None:
        self.pull()
        tables = self.source.describe()
        router, sketch = Router(self.source), Sketch(self.after)
        made = [self._instance(tables) for _ in range(INSTANCES)]
        bounds = [bind(self.source, tables, analysis, args) for analysis, args in made]
        for key, bound in enumerate(bounds):
            router.add(key, bound)
        last = dict.fromkeys(range(INSTANCES), self.after)
        for step in self.case.steps:
            self.write(step)
            for offset, change in self.pull():
                sketch.apply(offset, change)
                found = dict(router.route(change))
                for key, bound in enumerate(bounds):
                    place = bound.matters(change)
                    assert found.get(key) == place, f"router {found.get(key)}, matcher {place}: {made[key]}"
                    self._compare(offset, change, place, made[key])
                    last[key] = offset if place is not None else last[key]
            for key, bound in enumerate(bounds):
                assert sketch.version(bound) >= last[key], f"the sketch forgot {made[key]}"
            last[self._come_and_go(router, made, bounds, tables)] = 0

    def _come_and_go(self, router: Router, made: Any, bounds: Any, tables: dict[str, Table]) -> int:
        key = self.random.randrange(INSTANCES)
        router.remove(key)
        made[key] = self._instance(tables)
        bounds[key] = bind(self.source, tables, *made[key])
        router.add(key, bounds[key])
        return key

    def _compare(self, offset: int, change: Change, place: int | None, made: tuple[Analysis, dict[str, Any]]) -> None:
        truth = self.judge.matters(change, *made)
        self.counts["matched"] += truth is not None
        self.counts["asked"] += 1
        self.counts["wider"] += place is not None and truth is None
        told = f"{changes_text([(offset, change)])}\n{made}\n{change.table}"
        assert truth is None or (place is not None and place <= truth), f"{place} where SQLite says {truth}: {told}"

    def _instance(self, tables: dict[str, Table]) -> tuple[Analysis, dict[str, Any]]:
        args = {f"p{n}": self.world.value() for n in range(ARGS)}
        places = tuple(self._dependency(tables) for _ in range(self.random.choice([1, 1, 2, 3])))
        analysis = Analysis(
            sql="", parameters=tuple(args), columns=(), tables=(), objects=(), dependencies=places, epoch=""
        )
        return analysis, args

    def _dependency(self, tables: dict[str, Table]) -> Dependency:
        table = tables[self.random.choice([name for name in sorted(tables) if name.startswith("t")])]
        condition = self._condition(table, 2)
        if self.random.random() < 0.2:
            return Dependency(table.name, None, condition)
        some = self.random.sample(table.names, self.random.randint(0, 2))
        return Dependency(table.name, frozenset(some) | _columns(condition), condition)

    def _condition(self, table: Table, depth: int) -> Condition:
        roll = self.random.random()
        if depth and roll < 0.45:
            parts = tuple(self._condition(table, depth - 1) for _ in range(self.random.choice([0, 1, 2, 2, 2, 3])))
            return AllOf(parts) if self.random.random() < 0.6 else AnyOf(parts)
        exact = [column.name for column in table.columns if not doubt(table, column)]
        if not exact:
            return AllOf()
        op = self.random.choice([*OPS, "eq", "eq", "eq", "in"])
        count = 2 if "between" in op else self.random.randint(0, 4) if op.endswith("in") else 1
        return Comparison(self.random.choice(exact), op, tuple(self._operand() for _ in range(count)))

    def _operand(self) -> Operand:
        if self.random.random() < 0.3:
            return Param(f"p{self.random.randrange(ARGS)}")
        return Const(self.random.randint(0, 8) if self.random.random() < 0.3 else self.world.value())


def _columns(condition: Condition) -> frozenset[str]:
    if isinstance(condition, Comparison):
        return frozenset({condition.column})
    return frozenset().union(*map(_columns, condition.parts))


def run(first: int, count: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + count):
        case = make_case(seed, queries=0, steps=15)
        case.steps = [step for step in case.steps if not step.moves_schema]  # dependencies hold for one epoch
        try:
            Agreement(seed, case, counts).run()
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}\n\n{case.script()}", pytrace=False)
    print(f"\n{dict(counts)}")
    assert 0.1 < counts["matched"] / counts["asked"] < 0.6, counts
    assert counts["wider"] < 0.03 * counts["asked"], counts


def test_no_matcher_misses_a_row_that_sqlite_matches() -> None:
    run(5_000, 5)


@pytest.mark.slow
def test_no_matcher_misses_a_row_that_sqlite_matches_in_many_cases() -> None:
    run(0, 40)


@pytest.mark.soak(seconds=60)
def test_no_matcher_misses_a_row_that_sqlite_matches_in_fresh_cases(fresh_number: int) -> None:
    run(fresh_number, 500)
