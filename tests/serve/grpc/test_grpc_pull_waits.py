"""Limits on waiting calls of PullService/CdcPullLog, for one caller and for one database."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.queries.open_databases import Whole
from tests.serve.grpc_calls import Caller, calling
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.config import LogConfig, QuotasConfig, Secret
from headwater.serve.grpc.messages import message

PULL = "headwater.v1.PullService"
ADMIN = ("authorization", "Bearer admin")


@contextlib.contextmanager
def served(folder: Path, max_streams: int | None = None, **settings: Any) -> Iterator[tuple[Whole, Client]]:
    """A server with a table."""
    quotas = QuotasConfig(max_streams=max_streams)
    with (
        Whole(folder, log=LogConfig(flush_ms=5), quotas=quotas) as files,
        serving(files, folder=folder, token=Secret("admin"), **settings) as client,
    ):
        files.run("CREATE TABLE t(k INTEGER PRIMARY KEY)")
        client.http.headers["authorization"] = "Bearer admin"
        yield files, client


def waiting_request(caller: Caller, files: Whole) -> dict[str, Any]:
    """Return a request that waits for the next change."""
    (one,) = caller.call(f"{PULL}/ListRanges", table="t").ranges
    log = files.database("main").log
    assert files.database("main").catch_up(PATIENCE)
    log.flush()
    caller.call(f"{PULL}/CdcRegister", range_id=one.id, range_epoch=one.range_epoch, subscriber_name="me")
    return {
        "range_id": one.id,
        "range_epoch": one.range_epoch,
        "subscriber_name": "me",
        "last_log_index": log.latest,
        "wait_ms": 60_000,
    }


def waiting(caller: Caller, **fields: Any) -> Any:
    """Start a CdcPullLog call that waits; return its future."""
    call = caller.channel.unary_unary(
        f"/{PULL}/CdcPullLog", response_deserializer=message("headwater.v1.CdcPullLogResponse").FromString
    )
    request = message("headwater.v1.CdcPullLogRequest")(**fields).SerializeToString()
    return call.future(request, timeout=PATIENCE, metadata=caller.metadata)


def waits(client: Client) -> Any:
    """Return the callers that wait in the server."""
    return client.server._api.pulling()._waiting


@pytest.mark.parametrize(
    ("settings", "hint"), [({"max_streams": 1}, "max_streams"), ({"max_streams_per_client": 1}, "_per_client")]
)
def test_waiting_pulls_of_one_caller_and_of_one_database_are_limited(
    tmp_path: Path, settings: dict[str, Any], hint: str
) -> None:
    with (
        served(tmp_path, **settings) as (files, client),
        calling(client, ADMIN) as caller,
        calling(client, ADMIN) as waiter,  # a connection of its own: each may have only so many calls
    ):
        request = waiting_request(caller, files)
        first = waiting(waiter, **request)
        wait_until(lambda: waits(client)._held.total == 1, "the first one waits")
        failure = caller.refusal(f"{PULL}/CdcPullLog", **request)
        assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert hint in dict(failure.trailing_metadata())["headwater-hint"]
        caller.call(f"{PULL}/CdcPullLog", **request | {"wait_ms": 0})
        files.run("INSERT INTO t VALUES (1)")
        assert len(first.result().log_data) == 1
        again = waiting(waiter, **request | {"last_log_index": first.result().current_log_index})
        wait_until(lambda: waits(client)._held.total == 1, "the place was given back")
        again.cancel()
        wait_until(lambda: waits(client)._held.total == 0, "the second one left")
        found = caller.call(f"{PULL}/CdcPullLog", **request)
        assert len(found.log_data) == 1, "a place is given back by a caller that leaves, too"


def test_waiting_pulls_of_a_key_named_anonymous_are_limited(tmp_path: Path) -> None:
    with served(tmp_path) as (files, client), calling(client, ADMIN) as admin:
        request = waiting_request(admin, files)
        waits(client)._most = 8  # a fourth for one caller
        made = [client.ok("security.token.create", name="anonymous", role="owner")["token"] for _ in range(2)]
        mine, theirs = (("x-api-key", token) for token in made)
        with calling(client, mine) as caller, calling(client, theirs) as other:
            open_ones = [waiting(caller, **request) for _ in range(2)]
            wait_until(lambda: waits(client)._held.total == 2, "both wait")
            answer = caller.call(f"{PULL}/CdcPullLog", **request)
            assert answer.error.server_error.code == "limit_exceeded"
            open_ones.append(waiting(other, **request))
            wait_until(lambda: waits(client)._held.total == 3, "another key of the same name has its own share")
            files.run("INSERT INTO t VALUES (1)")
            assert [len(each.result().log_data) for each in open_ones] == [1, 1, 1]
