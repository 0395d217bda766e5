"""Readers on every transport, random filters, kills, restarts, a log that forgets, files that are restored:

whatever happens, every reader sees exactly what its filter lets through, or is told that it cannot.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
from feed_nemesis import FeedNemesis


def fresh_seed() -> str:
    """A new one, or the one to repeat."""
    return os.environ.get("SOAK_SEED") or secrets.token_hex(4)


@pytest.mark.slow
def test_feeds_keep_their_promises_under_the_nemesis_of_a_fixed_seed(tmp_path: Path) -> None:
    FeedNemesis("headwater", tmp_path).run()


@pytest.mark.slow
def test_feeds_keep_their_promises_under_the_nemesis_of_a_fresh_seed(tmp_path: Path) -> None:
    seed = fresh_seed()
    print(f"seed {seed}")
    FeedNemesis(seed, tmp_path).run()


@pytest.mark.soak
@pytest.mark.parametrize("place", range(int(os.environ.get("SOAK_SEEDS", "20"))))
def test_feeds_keep_their_promises_for_many_fresh_seeds(place: int, tmp_path: Path) -> None:
    seed = fresh_seed()
    print(f"seed {seed}")
    FeedNemesis(seed, tmp_path, rounds=6, readers=16).run()
