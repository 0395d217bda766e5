"""The router against a check of every instance."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.queries.dependencies.bound_tables import TABLES, analysis, args, change, query
from tests.sources.memory_source import MemorySource

from headwater.model.change import Change, Op
from headwater.model.dependencies.dependency import AllOf, AnyOf, Comparison, Const, Dependency, Param
from headwater.queries.dependencies import instance_router as router_module
from headwater.queries.dependencies.bound_dependencies import BoundDependencies, bind
from headwater.queries.dependencies.instance_router import Router

SOURCE = MemorySource("m")
T = TABLES["t"]


def naive(bounds: dict[int, BoundDependencies], asked: Change) -> dict[int, int]:
    found = {key: bound.matters(asked) for key, bound in bounds.items()}
    return {key: place for key, place in found.items() if place is not None}


def one_history(seed: int, *, odd: float, instances: int, changes: int) -> int:
    """Add and remove instances between random changes; return how many matches the router found."""
    rng = random.Random(seed)
    queries = [query(rng) for _ in range(rng.randrange(1, 12))]
    router, bounds, hits = Router(SOURCE), dict[int, BoundDependencies](), 0
    for turn in range(changes):
        for _ in range(rng.randrange(instances)):
            key = rng.randrange(instances * 4)
            if rng.random() < 0.4:
                router.remove(key)
                bounds.pop(key, None)
            else:
                bounds[key] = bind(SOURCE, TABLES, rng.choice(queries), args(rng))
                router.add(key, bounds[key])
        asked = change(rng, odd=odd)
        routed = router.route(asked)
        assert len(routed) == len({key for key, _ in routed}), (seed, turn)
        assert dict(routed) == naive(bounds, asked), (seed, turn, asked)
        hits += len(routed)
    assert len(router) == len(bounds) and not router.failures
    for key in bounds:
        router.remove(key)
    assert not router._tables and not len(router), seed
    return hits


@pytest.mark.slow
@pytest.mark.parametrize("odd", [0.0, 0.1, 0.6])
def test_router_finds_the_same_instances_as_checking_each(odd: float) -> None:
    assert sum(one_history(seed, odd=odd, instances=12, changes=25) for seed in range(60)) > 500


@pytest.mark.slow
def test_router_finds_the_same_instances_as_checking_each_of_many() -> None:
    assert sum(one_history(seed, odd=0.1, instances=60, changes=80) for seed in range(1_000, 1_020)) > 3_000


@pytest.mark.soak(seconds=30)
def test_router_finds_the_same_instances_as_checking_each_for_fresh_seeds(fresh_number: int) -> None:
    seeds = range(fresh_number, fresh_number + 300)
    assert sum(one_history(seed, odd=0.1, instances=60, changes=80) for seed in seeds) > 50_000


def test_router_evaluates_only_the_instances_that_the_index_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router(SOURCE)
    both = AllOf((Comparison("a", "eq", (Param("p"),)), Comparison("d", "gt", (Const(5),))))
    either = AnyOf((Comparison("a", "eq", (Param("p"),)), Comparison("d", "in", (Param("p"), Const(-1)))))
    between = AllOf((Comparison("a", "ge", (Param("p"),)), Comparison("a", "lt", (Param("q"),))))
    for key in range(3_000):
        made = analysis(Dependency("t", None, (both, either, between)[key % 3]))
        router.add(key, bind(SOURCE, TABLES, made, {"p": key, "q": key + 2}))
    assert len(router._tables["t"].homes) == 3
    asked: list[int] = []
    keep = router_module._keep

    def counting(entries: Any, *rest: Any) -> None:
        held = list(entries)
        asked.extend(entry.key for entry in held)
        keep(held, *rest)

    monkeypatch.setattr(router_module, "_keep", counting)
    assert dict(router.route(Change(Op.INSERT, T, None, (1, 12, 0, 0, 13)))) == {12: 0, 13: 0, 11: 0}
    assert sorted(asked) == [11, 12, 13]


def test_change_that_fails_the_index_is_checked_by_each_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router(SOURCE)
    for key in range(3):
        made = analysis(Dependency("t", None, Comparison("a", "eq", (Const(key),))))
        router.add(key, bind(SOURCE, TABLES, made, {}))

    def failing(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(router_module._Plan, "find", failing)
    assert router.route(Change(Op.INSERT, T, None, (1, 2, 0, 0, 0))) == [(2, 0)]
    assert router.failures == 1


def test_router_returns_each_instance_once_with_its_first_matching_table() -> None:
    router = Router(SOURCE)
    second = Dependency("t", frozenset({"a"}), Comparison("a", "eq", (Const(1),)))
    router.add("self-join", bind(SOURCE, TABLES, analysis(Dependency("u"), second, second, Dependency("t")), {}))
    assert router.route(Change(Op.INSERT, T, None, (1, 1, 0, 0, 0))) == [("self-join", 1)]
    assert router.route(Change(Op.INSERT, T, None, (1, 2, 0, 0, 0))) == [("self-join", 3)]
    router.add("self-join", bind(SOURCE, TABLES, analysis(second), {}))
    assert router.route(Change(Op.INSERT, T, None, (1, 2, 0, 0, 0))) == []
    router.remove("self-join")
    router.remove("never was")
    assert router.route(Change(Op.TRUNCATE, T)) == []
