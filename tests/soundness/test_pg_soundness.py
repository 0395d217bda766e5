"""Random PostgreSQL schemas, queries and writes: a 304 or a silence means that the answer is the same."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.soundness.pg_kit import Kit, Trial, Unsound
from tests.sources.postgres.pg_source import PgRig, shared_server

SEEDS = 60
FRESH = int(os.environ.get("SOUNDNESS_SEED") or secrets.randbits(40))
SOAK = int(os.environ.get("SOAK_SCHEMAS", "2000"))


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
    print(dict(sorted(counts.items())))
