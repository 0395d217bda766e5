"""Writes, kills, restarts: whatever happens, the log folds into the tables and keeps every promise."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
from nemesis import Nemesis


def fresh_seed() -> str:
    """A new one, or the one to repeat."""
    return os.environ.get("SOAK_SEED") or secrets.token_hex(4)


@pytest.mark.slow
def test_the_guarantees_hold_under_the_nemesis_of_a_fixed_seed(tmp_path: Path) -> None:
    Nemesis("headwater", tmp_path).run()


@pytest.mark.slow
def test_the_guarantees_hold_under_the_nemesis_of_a_fresh_seed(tmp_path: Path) -> None:
    seed = fresh_seed()
    print(f"seed {seed}")
    Nemesis(seed, tmp_path).run()


@pytest.mark.slow
def test_the_guarantees_hold_while_the_log_forgets(tmp_path: Path) -> None:
    seed = fresh_seed()
    print(f"seed {seed}")
    Nemesis(seed, tmp_path, rounds=3, retained=700).run()


@pytest.mark.soak
@pytest.mark.parametrize("place", range(int(os.environ.get("SOAK_SEEDS", "20"))))
def test_the_guarantees_hold_for_many_fresh_seeds(place: int, tmp_path: Path) -> None:
    seed = fresh_seed()
    print(f"seed {seed}")
    Nemesis(seed, tmp_path, retained=None if place % 4 else 700).run()
