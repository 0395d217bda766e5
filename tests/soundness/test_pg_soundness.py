"""Random PostgreSQL schemas, queries and writes: a 304 or a silence means that the answer is the same."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from tests.soundness.pg_kit import Kit, Trial, Unsound
from tests.sources.postgres.pg_source import PgRig, shared_server

from headwater.model.dependency import Dependency
from headwater.model.literal import UNAVAILABLE
from headwater.queries.shapes import View
from headwater.sources.postgres.analysis import analyse
from headwater.sources.postgres.analysis.order import Judged
from headwater.sources.postgres.analysis.places import Conditions
from headwater.sources.postgres.positions import Positions

SEEDS = 10
FRESH = int(os.environ.get("SOUNDNESS_SEED") or secrets.randbits(40))
SOAK = int(os.environ.get("SOAK_SCHEMAS", "50000")) // 50  # each takes as long as fifty on SQLite


@pytest.fixture(scope="module")
def kit() -> Iterator[Kit]:
    rig = PgRig(shared_server(), f"sound_{os.getpid()}")
    made = Kit(rig)
    yield made
    made.close()
    rig.close()


def run(kit: Kit, seeds: range, counts: Counter[str]) -> None:
    for seed in seeds:
        counts["schemas"] += 1
        try:
            Trial(kit, seed, counts).run()
        except Unsound as error:
            pytest.fail(str(error), pytrace=False)
        except Exception as error:
            error.add_note(f"SOUNDNESS_SEED={seed}")
            raise


def test_no_answer_changes_without_a_change_that_matters(kit: Kit) -> None:
    counts: Counter[str] = Counter()
    run(kit, range(SEEDS), counts)
    told = dict(sorted(counts.items()))
    print(told)
    # Random runs prove something only while answers hold rows, and change, and are not all stale.
    assert counts["with rows"] > 0.4 * counts["pairs"] and counts["changed"] > 0.05 * counts["pairs"], told
    assert counts["304"] > 0.5 * counts["pairs"] and counts["with conditions"] > 0.05 * counts["queries"], told
    assert counts["not kept"] < 0.2 * counts["queries"], told


@pytest.mark.slow
def test_no_answer_changes_under_a_fresh_seed(kit: Kit) -> None:
    print(f"SOUNDNESS_SEED={FRESH}")
    run(kit, range(FRESH, FRESH + (1 if "SOUNDNESS_SEED" in os.environ else 3)), Counter())


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_thousand_schemas(kit: Kit) -> None:
    start, counts = secrets.randbits(40), Counter[str]()
    print(f"\nseeds from {start}; one of them again: SOUNDNESS_SEED=…")
    run(kit, range(start, start + SOAK), counts)
    print(dict(sorted(counts.items())))


# --- the kit has teeth -----------------------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def _head(patch: pytest.MonkeyPatch) -> None:
    """An answer is said to stand where the log ends, as if what is logged were seen."""

    def seen(self: Positions, snapshot: str) -> int:
        visibility = self._visibility
        return visibility._logged[-1][1] if visibility._logged else visibility._forgotten

    patch.setattr(Positions, "seen", seen)


def _missing(patch: pytest.MonkeyPatch) -> None:
    """What is not told of an old row is taken for something else than what is asked for."""
    real = View.__missing__

    def known(self: View, place: int) -> bytes | None:
        return b"" if self._row[place] is UNAVAILABLE else real(self, place)

    patch.setattr(View, "__missing__", known)


def _columns(patch: pytest.MonkeyPatch) -> None:
    """A column that is read is not counted."""
    real: Any = analyse.dependencies

    def fewer(*args: Any, **more: Any) -> tuple[Dependency, ...]:
        found = real(*args, **more)
        return tuple(
            msgspec.structs.replace(each, columns=each.columns and frozenset(sorted(each.columns)[1:]))
            for each in found
        )

    patch.setattr(analyse, "dependencies", fewer)


def _outer(patch: pytest.MonkeyPatch) -> None:
    """What ON says of an outer join is taken for a condition on both sides."""
    patch.setattr(Conditions, "is_plain", property(lambda self: True, lambda self, value: None), raising=False)


def _ordered(patch: pytest.MonkeyPatch) -> None:
    """Any order is taken for a total one."""
    real: Any = analyse.judge
    patch.setattr(analyse, "judge", lambda trees, known: Judged(real(trees, known).reasons, ()))


def _before(patch: pytest.MonkeyPatch) -> None:
    """The condition of one table is taken for that of all."""
    real: Any = Conditions._place
    patch.setattr(Conditions, "_place", lambda self, oid: 1 if oid in self._relations else real(self, oid))


MUTANTS: dict[str, tuple[Patch, int]] = {
    "position": (_head, 0),
    "missing": (_missing, 0),
    "columns": (_columns, 0),
    "outer": (_outer, 0),
    "ordered": (_ordered, 0),
}


def finds(kit: Kit, patch: Patch, seed: int) -> bool:
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch(monkeypatch)
        kit.rig.source._analyses._known.clear()
        try:
            Trial(kit, seed, Counter()).run()
        except Unsound:
            return True
        finally:
            kit.rig.source._analyses._known.clear()
    return False


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(kit: Kit, name: str) -> None:
    patch, seed = MUTANTS[name]
    assert finds(kit, patch, seed), "the grammar moved: another seed finds it now"


@pytest.mark.soak
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_searched_for(kit: Kit, name: str) -> None:
    found = next((seed for seed in range(60) if finds(kit, MUTANTS[name][0], seed)), None)
    print(f"\n{name}: {found}")
    assert found is not None
