"""Instances that feeds subscribe to, while the schema changes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.queries.open_databases import Whole

from headwater.model.principal import ADMIN
from headwater.queries.answers import Answering
from headwater.queries.dependencies.subscribed_instances import SubscribedInstances, UnusableInstance

VIEW = "CREATE VIEW v AS SELECT id FROM t"


def test_schema_change_after_a_failed_analysis_is_after_the_head_of_the_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that, a hub would not analyse the query again, and its readers would get no changes of rows."""
    with Whole(tmp_path) as whole:
        whole.run("CREATE TABLE t(id INTEGER PRIMARY KEY)")
        whole.run(VIEW)
        analyse = Answering.instance

        async def create_afterwards(self: Answering, *args: Any) -> Any:
            try:
                return await analyse(self, *args)
            finally:
                await asyncio.to_thread(whole.run, VIEW)

        async def find() -> tuple[Any, int]:
            queries = whole.open_queries(asyncio.to_thread)
            query = (await queries.prepare(ADMIN, "SELECT id FROM v")).prepared
            await asyncio.to_thread(whole.run, "DROP VIEW v")
            monkeypatch.setattr(Answering, "instance", create_afterwards)
            found = await SubscribedInstances(queries).find("main", query.id, [], strict=False)
            monkeypatch.undo()
            return found, await queries.answering("main").head()

        found, head = asyncio.run(find())
        assert isinstance(found, UnusableInstance)
        assert found.head < head
