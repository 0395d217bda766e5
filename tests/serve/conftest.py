"""The real databases of tests/queries serve here too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "queries"))

if TYPE_CHECKING:
    from grpc_calls import Caller
    from open_databases import Whole
    from serving import Client


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Whole]:
    """A database with two tables of the same shape."""
    from open_databases import Whole

    from headwater.config import LogConfig

    with Whole(tmp_path / "data", log=LogConfig(flush_ms=5)) as made:
        made.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v)")
        made.run("CREATE TABLE u(k INTEGER PRIMARY KEY, v)")
        yield made


@pytest.fixture
def client(files: Whole) -> Iterator[Client]:
    """A server of it."""
    from serving import serving

    with serving(files) as made:
        yield made


@pytest.fixture
def caller(client: Client) -> Iterator[Caller]:
    """Who calls its gRPC methods."""
    from grpc_calls import calling

    with calling(client) as made:
        yield made
