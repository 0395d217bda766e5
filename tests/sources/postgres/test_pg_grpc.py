"""SochDB's services over PostgreSQL: transactions, keys of every kind, TRUNCATE, and values that were not sent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from tests.cli.cli_process import Served, run, served
from tests.serve.grpc_calls import SUBSCRIPTIONS, Caller
from tests.sources.postgres.pg_source import shared_server

INSERT, UPDATE, DELETE, SCHEMA_CHANGE = 1, 2, 3, 4
NAME = f"grpc_{os.getpid()}"
KINDS = {  # type -> a key, and another
    "int": ("7", "8"),
    "bigint": ("-9007199254740993", "0"),
    "numeric": ("1.50", "-2"),
    "text": ("'ä''b'", "''"),
    "uuid": ("'6ec7f5a8-2b5f-4cde-9d38-6f5c2b2f1c11'", "'00000000-0000-0000-0000-000000000000'"),
    "bytea": ("'\\x00ff'", "'\\x'"),
    "boolean": ("true", "false"),
    "date": ("'2026-11-16'", "'0044-03-15 BC'"),
    "timestamptz": ("'2026-11-16 05:00:00.25+00'", "'infinity'"),
    "double precision": ("1.5", "'NaN'"),
    "inet": ("'10.0.0.1'", "'::1'"),
}


@pytest.fixture(scope="module")
def db() -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    server = shared_server()
    with server.connect() as admin:
        admin.execute(f"CREATE DATABASE {NAME}")
    found = server.connect(NAME)
    found.execute("CREATE TABLE t(k int PRIMARY KEY, v text)")
    for number, kind in enumerate(KINDS):
        found.execute(f"CREATE TABLE kind{number}(k {kind} PRIMARY KEY, v text)")
    found.execute("CREATE TABLE wide(k int PRIMARY KEY, small int, large text)")
    found.execute("ALTER TABLE wide ALTER COLUMN large SET STORAGE EXTERNAL")
    yield found
    found.close()
    run("source", "detach", url())
    with server.connect() as admin:
        admin.execute(f"DROP DATABASE {NAME} WITH (FORCE)")


def url() -> str:
    return f"{NAME}=postgresql://postgres@/{NAME}?host={shared_server().folder}"


@pytest.fixture(scope="module")
def server(db: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("pg-grpc"), url()) as made:
        yield made


@pytest.fixture
def caller(server: Served) -> Iterator[Caller]:
    made = Caller(server.grpc)
    with made.channel:
        yield made


def test_changes_carry_their_transaction_id(db: Any, caller: Caller) -> None:
    reader = caller.subscribe(namespace=NAME, tables=["t"])
    with db.transaction():
        (xid,) = db.execute("SELECT pg_current_xact_id()::text").fetchone()
        db.execute("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    found = reader.take(2)
    assert [event.txn_id for event in found] == [int(xid)] * 2
    assert [json.loads(event.after_value) for event in found] == [{"k": 1, "v": "a"}, {"k": 2, "v": "b"}]


def test_aborted_transaction_is_not_delivered(db: Any, caller: Caller) -> None:
    reader = caller.subscribe(namespace=NAME, tables=["t"])
    with db.transaction(force_rollback=True):
        db.execute("INSERT INTO t VALUES (11, 'no')")
    db.execute("INSERT INTO t VALUES (12, 'yes')")
    (found,) = reader.take(1)
    assert json.loads(found.after_value)["k"] == 12


def test_truncate_is_delivered_as_one_delete_event_with_an_empty_key(db: Any, caller: Caller) -> None:
    deletes = caller.subscribe(namespace=NAME, tables=["t"], operations=[DELETE])
    readers = [caller.watch(namespace=NAME, table="t"), caller.watch(namespace=NAME, key=b"\x30x\0\x01")]
    db.execute("TRUNCATE t")
    (found,) = deletes.take(1)
    assert (found.operation, found.key, found.ddl, found.before_value) == (DELETE, b"", "TRUNCATE TABLE t", b"")
    assert [reader.take(1)[0].operation for reader in readers] == [DELETE, DELETE]


@pytest.mark.parametrize("kind", KINDS)
def test_watch_on_the_key_of_an_event_delivers_its_changes(db: Any, caller: Caller, kind: str) -> None:
    table = f"kind{list(KINDS).index(kind)}"
    reader = caller.subscribe(namespace=NAME, tables=[table])
    one, other = KINDS[kind]
    db.execute(f"INSERT INTO {table} VALUES ({one}, 'one'), ({other}, 'other')")
    first, second = reader.take(2)
    assert first.key and second.key and first.key != second.key
    for event, value in ((first, one), (second, other)):
        watch = caller.watch(namespace=NAME, table=table, key=event.key)
        db.execute(f"UPDATE {table} SET v = v || '!'")
        (seen,) = watch.take(1)
        assert json.loads(seen.after_value)["v"].rstrip("!") == json.loads(event.after_value)["v"], value
        watch.call.cancel()


def test_values_that_were_not_sent_are_named(db: Any, caller: Caller) -> None:
    db.execute("INSERT INTO wide VALUES (1, 1, repeat('x', 10000))")
    reader, watch = caller.subscribe(namespace=NAME, tables=["wide"]), caller.watch(namespace=NAME, table="wide")
    db.execute("UPDATE wide SET small = 2")
    (event,), (seen,) = reader.take(1), watch.take(1)
    for found in (event, seen):
        assert json.loads(found.after_value) == {"k": 1, "small": 2}
        assert list(found.unavailable) == ["large", "small"]  # of which the one before has neither
        assert json.loads(found.before_value) == {"k": 1}


def test_open_subscription_is_listed_with_its_namespace(caller: Caller) -> None:
    reading = caller.subscribe(namespace=NAME, tables=["t"])
    path = f"{SUBSCRIPTIONS}/ListSubscriptions"
    assert NAME in {each.namespace for each in caller.call(path, namespace=NAME).subscriptions}
    reading.call.cancel()
