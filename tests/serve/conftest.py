"""Fixtures of the server: a database, a client of a server of it, a caller of its gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.queries.open_databases import Whole
    from tests.serve.grpc_calls import Caller
    from tests.serve.server_fixture import Client


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Whole]:
    """A database with two tables of the same shape."""
    from tests.queries.open_databases import Whole

    from headwater.config import LogConfig

    with Whole(tmp_path / "data", log=LogConfig(flush_ms=5)) as made:
        made.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v)")
        made.run("CREATE TABLE u(k INTEGER PRIMARY KEY, v)")
        yield made


@pytest.fixture
def client(files: Whole) -> Iterator[Client]:
    """A client of a server of `files`."""
    from tests.serve.server_fixture import serving

    with serving(files) as made:
        yield made


@pytest.fixture
def caller(client: Client) -> Iterator[Caller]:
    """A caller of the server's gRPC methods."""
    from tests.serve.grpc_calls import calling

    with calling(client) as made:
        yield made
