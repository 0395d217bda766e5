"""Writes, kills, restarts: the log always folds to the tables and keeps its guarantees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.guarantees.nemesis import Nemesis
from tests.guarantees.sqlite_nemesis_databases import SqliteLog


@pytest.mark.slow
def test_sqlite_log_keeps_its_guarantees_under_faults_of_a_fixed_seed(tmp_path: Path) -> None:
    Nemesis(SqliteLog("headwater", tmp_path), rounds=3).run()


@pytest.mark.slow
def test_sqlite_log_keeps_its_guarantees_under_faults_of_a_fresh_seed(tmp_path: Path, fresh_seed: str) -> None:
    Nemesis(SqliteLog(fresh_seed, tmp_path), rounds=2).run()


@pytest.mark.slow
def test_sqlite_log_keeps_its_guarantees_under_faults_with_short_retention(tmp_path: Path, fresh_seed: str) -> None:
    Nemesis(SqliteLog(fresh_seed, tmp_path, retained=700), rounds=2).run()


@pytest.mark.soak(seconds=60)
@pytest.mark.parametrize("place", range(int(os.environ.get("SOAK_SEEDS", "20"))))
def test_sqlite_log_keeps_its_guarantees_under_faults_of_many_fresh_seeds(
    place: int, tmp_path: Path, fresh_seed: str
) -> None:
    Nemesis(SqliteLog(fresh_seed, tmp_path, retained=None if place % 4 else 700), rounds=5).run()
