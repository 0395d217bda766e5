"""Pulls of PostgreSQL in an earlier table version, also one that no change in the log has."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.pipeline.pg_all_types_table import PgLive

from headwater.client import Client
from headwater.errors import NotFound


@pytest.mark.slow
def test_postgresql_log_can_be_read_in_any_earlier_version_of_the_table(tmp_path: Path) -> None:
    source = PgLive(
        tmp_path,
        "CREATE TABLE t(id int PRIMARY KEY, v text)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "CREATE TABLE other(id int PRIMARY KEY)",
        "INSERT INTO t VALUES (1, 'a')",  # before anybody looked: the first shape is in no change
    )
    try:
        with Client(source.live.url) as client:
            first = client.describe("main", "t")
            source.run("INSERT INTO other VALUES (1)", "ALTER TABLE t ADD COLUMN n int", "UPDATE t SET n = 1")
            second = client.describe("main", "t", after=first.latest, shape=first.table.version)
            assert second.table.version == first.table.version + 1 and second.schema_changed_at is not None
            source.run("ALTER TABLE t DROP COLUMN v", "UPDATE t SET n = 2")
            third = client.describe("main", "t")
            found = {}
            for seen in (first, second, third):
                shape = seen.table.version
                batches = client.log("main", "t", generation=third.generation, after=0, upto=third.latest, shape=shape)
                found[shape] = [row for batch in batches for row in batch.to_pylist()]
            assert [sorted({*row} & {"id", "v", "n"}) for row in (rows[-1] for rows in found.values())] == [
                ["id", "v"],
                ["id", "n", "v"],
                ["id", "n"],
            ]
            assert [rows[-1].get("n") for rows in found.values()] == [None, 2, 2]
            with pytest.raises(NotFound, match="never had a version 9"):
                list(client.log("main", "t", generation=third.generation, after=0, upto=third.latest, shape=9))
    finally:
        source.close()
