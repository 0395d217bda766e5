"""Cost of finding the query instances that one change is relevant to, by the number of instances."""

from __future__ import annotations

import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Callable

from bench.sides import versions
from headwater.model.change import Change, Op
from headwater.model.dependencies.dependency import AllOf, Analysis, Comparison, Condition, Const, Dependency, Param
from headwater.model.table import Column, Row, Table
from headwater.queries.dependencies.bound_dependencies import BoundDependencies, bind
from headwater.queries.dependencies.instance_router import Router
from headwater.sources.sqlite.key_order import order
from headwater.sources.sqlite.query.where import Predicates

COUNTS = (1_000, 10_000, 100_000)
QUERIES = 50
BAR, PACE = 1.5, 100_000  # times the cost with few; changes a second
NAIVE_CHANGES = 20
SEED = 5

KINDS = {"id": "INTEGER", "owner": "INTEGER", "org": "INTEGER", "region": "TEXT", "state": "TEXT", "total": "REAL"}
MORE = {"title": "TEXT", "note": "TEXT", "day": "TEXT"}
TABLES = {
    name: Table(
        name,
        tuple(
            Column(each, {"INTEGER": "i64", "TEXT": "str", "REAL": "f64"}[kind], kind)
            for each, kind in (KINDS | MORE).items()
        ),
        ("id",),
    )
    for name in ("orders", "customers", "items", "stock", "events")
}
STATES, REGIONS, IDS, ORGS = ("new", "open", "paid", "sent", "done"), 50, 1_000_000, 500


class Compared:
    """The comparisons of a SQLite source, without a database."""

    def __init__(self) -> None:
        self.order = order
        self.stored = Predicates().stored


def test(column: str, op: str, *names: str) -> Comparison:
    return Comparison(column, op, tuple(map(Param, names)))


SELECTIVE: list[Condition] = [
    test("id", "eq", "id"),
    test("owner", "eq", "owner"),
    AllOf((test("owner", "eq", "owner"), Comparison("state", "eq", (Const("open"),)))),
    AllOf((test("owner", "eq", "owner"), test("total", "gt", "total"))),
    test("id", "in", "id", "owner", "other"),
    AllOf((test("id", "ge", "low"), test("id", "lt", "high"))),
]
BROAD: list[Condition] = [
    AllOf((test("region", "eq", "region"), test("state", "eq", "state"), test("org", "eq", "org"))),
    AllOf((test("org", "eq", "org"), test("state", "in", "state", "state2"))),
]


def queries(rng: random.Random, conditions: list[Condition]) -> list[Analysis]:
    """Return analyses over one table, and every fourth over a join, each with other columns."""
    found = []
    for number in range(QUERIES):
        places = []
        for _ in range(1 + (number % 4 == 0)):
            condition = conditions[number % len(conditions)] if not places else rng.choice(conditions)
            seen = {*columns_of(condition), *rng.sample([*KINDS, *MORE], 3)}
            places.append(Dependency(rng.choice(list(TABLES)), frozenset(seen), condition))
        names = tuple(each.table for each in places)
        found.append(
            Analysis(
                sql="", parameters=(), columns=(), tables=names, objects=names, dependencies=tuple(places), epoch=""
            )
        )
    return found


def columns_of(condition: Condition) -> set[str]:
    if isinstance(condition, Comparison):
        return {condition.column}
    return {name for part in condition.parts for name in columns_of(part)}


def arguments(rng: random.Random) -> dict[str, int | float | str]:
    low = rng.randrange(IDS)
    return {
        "id": rng.randrange(IDS), "owner": rng.randrange(IDS), "other": rng.randrange(IDS), "org": rng.randrange(ORGS),
        "region": f"region-{rng.randrange(REGIONS)}", "state": rng.choice(STATES), "state2": rng.choice(STATES),
        "total": rng.random() * 1_000, "low": low, "high": low + 20,
    }  # fmt: skip


def row(rng: random.Random) -> Row:
    region, state = f"region-{rng.randrange(REGIONS)}", rng.choice(STATES)
    return (
        rng.randrange(IDS),
        rng.randrange(IDS),
        rng.randrange(ORGS),
        region,
        state,
        rng.random() * 1_000,
        "t",
        "n",
        "d",
    )


def changes(rng: random.Random, count: int) -> list[Change]:
    """Return random changes; about half are updates of one to three columns."""
    found = []
    for _ in range(count):
        table, before = rng.choice(list(TABLES.values())), row(rng)
        op = rng.choice([Op.INSERT, Op.UPDATE, Op.UPDATE, Op.DELETE])
        after, fresh = list(before), row(rng)
        for place in rng.sample(range(1, len(before)), rng.randrange(1, 4)):
            after[place] = fresh[place] if place < len(KINDS) else f"{fresh[0]}"
        found.append(Change(op, table, None if op is Op.INSERT else before, None if op is Op.DELETE else tuple(after)))
    return found


def timed(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(conditions: list[Condition], count: int, source: Compared) -> tuple[float, float]:
    """Print the line of one measurement; return microseconds per change and instances found."""
    rng = random.Random(SEED)
    prepared, asked = queries(rng, conditions), changes(random.Random(SEED + 1), 20_000)
    given = [(rng.choice(prepared), arguments(rng)) for _ in range(count)]
    router, bounds = Router(source), list[BoundDependencies]()  # type: ignore[arg-type]
    tracemalloc.start()
    for each, args in given[:2_000]:
        router.add(len(bounds), bind(source, TABLES, each, args))  # type: ignore[arg-type]
        bounds.append(BoundDependencies(()))
    kib = tracemalloc.get_traced_memory()[0] / 1024 / min(count, 2_000)
    tracemalloc.stop()
    router, bounds = Router(source), []  # type: ignore[arg-type]
    binding = timed(lambda: bounds.extend(bind(source, TABLES, each, args) for each, args in given))  # type: ignore[arg-type]
    adding = timed(lambda: [router.add(key, bound) for key, bound in enumerate(bounds)])
    gc.collect()
    gc.freeze()
    for change in asked[:500]:
        router.route(change)
    hits = sum(len(router.route(change)) for change in asked) / len(asked)
    cost = min(timed(lambda: [router.route(change) for change in asked]) for _ in range(3)) / len(asked) * 1e6
    naive = timed(lambda: compare(router, bounds, asked[:NAIVE_CHANGES])) / NAIVE_CHANGES * 1e6
    gc.unfreeze()
    print(
        f"    {count:>7,} instances  {cost:>7.2f} us a change ({1e6 / cost:>9,.0f}/s)  {hits:>7.2f} hits"
        f"  asking each {naive:>10,.0f} us ({naive / cost:>7,.0f}x)"
        f"  bind {binding / count * 1e6:>5.1f} us, add {adding / count * 1e6:>4.1f} us, {kib:.2f} KiB each",
        flush=True,
    )
    return cost, hits


def compare(router: Router, bounds: list[BoundDependencies], asked: list[Change]) -> None:
    """Check that the router finds the same instances as asking each instance."""
    for change in asked:
        told = {key: place for key, bound in enumerate(bounds) if (place := bound.matters(change)) is not None}
        assert told == dict(router.route(change)), "the router does not say what its instances say"


def main(most: int = COUNTS[-1]) -> None:
    """Print costs and ratios."""
    print(versions())
    print(f"routing: CPU per change, {QUERIES} prepared queries over {len(TABLES)} tables ({PACE:,}/s, {BAR:g}x)")
    source = Compared()
    for name, conditions in (("selective", SELECTIVE), ("mixed", SELECTIVE + BROAD)):
        print(f"  {name}")
        costs = [measure(conditions, count, source)[0] for count in COUNTS if count <= most]
        print(f"    most against fewest: {costs[-1] / costs[0]:.2f}x")


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:]))
