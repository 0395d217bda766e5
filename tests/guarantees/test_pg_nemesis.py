"""The nemesis over PostgreSQL, which is killed as well: the log has what it committed, and readers receive it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.guarantees.nemesis import Nemesis
from tests.guarantees.pg_nemesis_database import Postgres


@pytest.mark.slow
def test_postgresql_log_keeps_its_guarantees_under_faults_of_a_fixed_seed(tmp_path: Path) -> None:
    Nemesis(Postgres("headwater", tmp_path), rounds=4).run()


@pytest.mark.soak(seconds=120)
@pytest.mark.parametrize("place", range(int(os.environ.get("SOAK_SEEDS", "20"))))
def test_postgresql_log_keeps_its_guarantees_under_faults_of_many_fresh_seeds(
    place: int, tmp_path: Path, fresh_seed: str
) -> None:
    Nemesis(Postgres(fresh_seed, tmp_path), rounds=8).run()
