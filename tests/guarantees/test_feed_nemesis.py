"""Readers on every transport, random filters, watched queries, kills, full disks, short logs, restored files: every
reader receives exactly what its filter passes, or is told to resnapshot.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.guarantees.nemesis import Nemesis
from tests.guarantees.sqlite_nemesis_databases import SqliteFeeds


@pytest.mark.slow
def test_feeds_keep_their_guarantees_under_faults_of_a_fixed_seed(tmp_path: Path) -> None:
    Nemesis(SqliteFeeds("headwater", tmp_path), rounds=4).run()


@pytest.mark.slow
def test_feeds_keep_their_guarantees_under_faults_of_a_fresh_seed(tmp_path: Path, fresh_seed: str) -> None:
    Nemesis(SqliteFeeds(fresh_seed, tmp_path), rounds=4).run()


@pytest.mark.soak(seconds=120)
@pytest.mark.parametrize("place", range(int(os.environ.get("SOAK_SEEDS", "20"))))
def test_feeds_keep_their_guarantees_under_faults_of_many_fresh_seeds(
    place: int, tmp_path: Path, fresh_seed: str
) -> None:
    Nemesis(SqliteFeeds(fresh_seed, tmp_path), rounds=6, more_readers=4).run()
