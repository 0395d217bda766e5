"""Exactly once at the sink: whatever is killed, the lake ends equal to the source."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.guarantees.pipeline_nemesis import Nemesis
from tests.guarantees.pipeline_process import Cluster

from headwater.pipeline.spark.java import find_java

pytestmark = pytest.mark.spark


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Yield a standalone Spark master with two workers."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    cluster = Cluster(folder, str(find_java().home))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.mark.soak(seconds=100, every_time=True)
def test_lake_equals_the_source_after_kills_on_local_spark(tmp_path: Path, fresh_seed: str) -> None:
    Nemesis(fresh_seed, tmp_path, rounds=2, size=20_000).run()


@pytest.mark.soak(seconds=130, every_time=True)
def test_lake_equals_the_source_after_kills_on_a_spark_cluster(
    tmp_path: Path, cluster: Cluster, fresh_seed: str
) -> None:
    Nemesis(fresh_seed, tmp_path, cluster=cluster, rounds=1, size=20_000).run()


@pytest.mark.soak(seconds=200)
@pytest.mark.parametrize("place", range(int(os.environ.get("SOAK_SEEDS", "20")) // 2))
def test_lake_equals_the_source_for_many_seeds_on_local_spark(place: int, tmp_path: Path, fresh_seed: str) -> None:
    Nemesis(fresh_seed, tmp_path).run()


@pytest.mark.soak(seconds=240)
@pytest.mark.parametrize("place", range(int(os.environ.get("SOAK_SEEDS", "20")) // 2))
def test_lake_equals_the_source_for_many_seeds_on_a_spark_cluster(
    place: int, tmp_path: Path, cluster: Cluster, fresh_seed: str
) -> None:
    Nemesis(fresh_seed, tmp_path, cluster=cluster).run()
