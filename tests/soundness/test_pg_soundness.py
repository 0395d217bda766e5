"""Random PostgreSQL schemas, queries and writes: after a 304, or without an invalidation, the answer is unchanged."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from tests.soundness.pg_differential_checker import Kit, Trial, Unsound
from tests.soundness.pg_schemas import ByHand
from tests.sources.postgres.pg_source import PgRig, shared_server

from headwater.model.dependencies.dependency import Dependency
from headwater.model.literal import UNAVAILABLE
from headwater.queries.dependencies.column_bytes import View
from headwater.sources.postgres.capture.log_positions import Positions
from headwater.sources.postgres.query.analysis import analysis
from headwater.sources.postgres.query.analysis.result_order import OrderVerdict
from headwater.sources.postgres.query.analysis.row_conditions import Conditions
from headwater.sources.postgres.snapshot_visibility import VisibleOffset

FIXED, FRESH, SOAK = 7, 3, 20  # schemas of one test; each takes as long as fifty on SQLite
SOAK_SHARDS = 5 * int(os.environ.get("SOAK_SEEDS", "20")) // 2


@pytest.fixture(scope="module")
def kit() -> Iterator[Kit]:
    rig = PgRig(shared_server(), f"sound_{os.getpid()}")
    made = Kit(rig)
    yield made
    made.close()
    rig.close()


def run(kit: Kit, seeds: range, counts: Counter[str]) -> None:
    only = os.environ.get("SOUNDNESS_SEED")
    for seed in [int(only)] if only else seeds:
        counts["schemas"] += 1
        try:
            Trial(kit, seed, counts).run()
        except Unsound as error:
            pytest.fail(str(error), pytrace=False)
        except Exception as error:
            error.add_note(f"SOUNDNESS_SEED={seed}")
            raise


def has_teeth(counts: Counter[str]) -> None:
    """Check that answers had rows, changed, and were not all stale: random runs prove something only then."""
    told = dict(sorted(counts.items()))
    print(told)
    assert counts["with rows"] > 0.4 * counts["pairs"] and counts["changed"] > 0.05 * counts["pairs"], told
    assert counts["304"] > 0.5 * counts["pairs"] and counts["with conditions"] > 0.05 * counts["queries"], told
    assert counts["not kept"] < 0.2 * counts["queries"], told


def test_answer_without_an_invalidation_is_unchanged(kit: Kit) -> None:
    counts: Counter[str] = Counter()
    run(kit, range(FIXED), counts)
    has_teeth(counts)


@pytest.mark.slow
def test_answer_without_an_invalidation_is_unchanged_for_a_fresh_seed(kit: Kit, fresh_number: int) -> None:
    run(kit, range(fresh_number, fresh_number + FRESH), Counter())


@pytest.mark.soak(seconds=20)
@pytest.mark.parametrize("shard", range(SOAK_SHARDS))
def test_answer_without_an_invalidation_is_unchanged_in_fresh_postgresql_schemas(
    kit: Kit, shard: int, fresh_number: int
) -> None:
    counts: Counter[str] = Counter()
    run(kit, range(fresh_number, fresh_number + SOAK), counts)
    has_teeth(counts)


# --- the kit has teeth -----------------------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def _head(patch: pytest.MonkeyPatch) -> None:
    """Give each answer the offset of the end of the log, as if all that is logged were visible."""

    def place(self: Positions, snapshot: str) -> VisibleOffset:
        found = self._barriers.set()
        assert found.offset is not None
        return VisibleOffset(found.offset, is_exact=True, is_behind=False, schema=found.schema)

    patch.setattr(Positions, "place", place)


def _missing(patch: pytest.MonkeyPatch) -> None:
    """Treat an unknown value of an old row as different from the one compared with."""
    real = View.__missing__

    def known(self: View, place: int) -> bytes | None:
        return b"" if self._row[place] is UNAVAILABLE else real(self, place)

    patch.setattr(View, "__missing__", known)


def _columns(patch: pytest.MonkeyPatch) -> None:
    """Leave one column that is read out of the dependencies."""
    real: Any = analysis.dependencies

    def fewer(*args: Any, **more: Any) -> tuple[Dependency, ...]:
        found = real(*args, **more)
        return tuple(
            msgspec.structs.replace(each, columns=each.columns and frozenset(sorted(each.columns)[1:]))
            for each in found
        )

    patch.setattr(analysis, "dependencies", fewer)


def _outer(patch: pytest.MonkeyPatch) -> None:
    """Treat the ON condition of an outer join as a condition on both sides."""
    patch.setattr(Conditions, "is_plain", property(lambda self: True, lambda self, value: None), raising=False)


def _ordered(patch: pytest.MonkeyPatch) -> None:
    """Treat every order as total."""
    real: Any = analysis.judge
    patch.setattr(analysis, "judge", lambda trees, known: OrderVerdict(real(trees, known).reasons, ()))


TABLE = "CREATE TABLE t (k int PRIMARY KEY, a int, b int)"
ROWS = "INSERT INTO t VALUES (1, 1, 1), (2, 2, 2), (3, 1, 3)"
FULL = "ALTER TABLE t REPLICA IDENTITY FULL"
LOOSE = "CREATE TABLE t (k int, a int, b int)"
OTHER = "CREATE TABLE u (k int PRIMARY KEY, a int)"
JOINED = "SELECT x.k, y.a FROM t AS x LEFT JOIN u AS y ON y.k = x.k AND x.a = 1 ORDER BY x.k"
# A bug, and a case that finds it: what is set up, a query, and what is written then.
MUTANTS: dict[str, tuple[Patch, list[str], str, list[str]]] = {
    "position": (_head, [TABLE, ROWS], "SELECT k, a FROM t ORDER BY k", ["UPDATE t SET a = 7 WHERE k = 1"]),
    "missing": (_missing, [TABLE, ROWS], "SELECT k FROM t WHERE a = 1", ["UPDATE t SET a = 2 WHERE k = 1"]),
    "columns": (_columns, [TABLE, FULL, ROWS], "SELECT a FROM t WHERE k = 1", ["UPDATE t SET a = 7 WHERE k = 1"]),
    "outer": (_outer, [TABLE, FULL, OTHER, ROWS], JOINED, ["INSERT INTO t VALUES (5, 2, 2)"]),
    "ordered": (_ordered, [LOOSE, FULL, ROWS], "SELECT a, k FROM t WHERE k > 0", ["UPDATE t SET b = 9 WHERE k = 1"]),
}


def is_unsound(kit: Kit, name: str) -> bool:
    _, setup, query, writes = MUTANTS[name]
    kit.rig.source._analyses._known.clear()
    try:
        Trial(kit, 0, Counter(), ByHand(f"m{next(kit.trials)}_", setup, query, writes)).run()
    except Unsound:
        return True
    return False


@pytest.mark.parametrize("name", MUTANTS)
def test_postgresql_mutant_is_found(kit: Kit, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_unsound(kit, name)
    MUTANTS[name][0](monkeypatch)
    assert is_unsound(kit, name)
