"""headwater.v1.PullService over a real channel: pages, marks, epochs, and every error in an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.queries.open_databases import Whole
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import PATIENCE

from headwater.config import LogConfig, PullConfig, Secret
from headwater.model.keys.key import encode_key
from headwater.serve.grpc.messages import message, pool

ROWS = (
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 60)"
    " INSERT INTO t SELECT i, 'row ' || i FROM n"
)
NUMBERS = {  # the seed's own: name -> number and type
    "CdcRegisterRequest": {"range_id": (1, 4), "range_epoch": (2, 11), "subscriber_name": (3, 9)},
    "CdcRegisterResponse": {"init_snapshot_version": (1, 4), "error": (2, 11)},
    "CdcChangeData": {"type": (1, 14), "key": (2, 12), "value": (3, 12)},
    "CdcPullSnapshotRequest": {
        "range_id": (1, 4),
        "range_epoch": (2, 11),
        "subscriber_name": (3, 9),
        "current_snapshot_version": (4, 4),
        "last_key": (5, 12),
    },
    "CdcPullSnapshotResponse": {
        "error": (1, 11),
        "current_snapshot_version": (2, 4),
        "snapshot_data": (3, 11),
        "end": (4, 8),
    },
    "CdcPullLogRequest": {
        "range_id": (1, 4),
        "range_epoch": (2, 11),
        "subscriber_name": (3, 9),
        "last_log_index": (4, 4),
    },
    "CdcPullLogResponse": {"error": (1, 11), "log_data": (2, 11), "current_log_index": (3, 4)},
    "RangeEpoch": {"conf_ver": (1, 4), "version": (2, 4)},
}


class Puller:
    """Calls of one subscriber of the PullService."""

    def __init__(self, client: Client, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self.client, self.metadata = client, metadata
        self.channel = grpc.insecure_channel(client.server.grpc_address)

    def call(self, method: str, **fields: Any) -> Any:
        described = pool().FindServiceByName("headwater.v1.PullService").FindMethodByName(method)
        asked, answer = (message(each.full_name) for each in (described.input_type, described.output_type))
        call = self.channel.unary_unary(f"/headwater.v1.PullService/{method}", response_deserializer=answer.FromString)
        return call(asked(**fields).SerializeToString(), timeout=PATIENCE, metadata=self.metadata)

    def ranges(self, **more: Any) -> list[Any]:
        return list(self.call("ListRanges", table="t", **more).ranges)

    def of(self, one: Any, name: str = "me") -> dict[str, Any]:
        return {"range_id": one.id, "range_epoch": one.range_epoch, "subscriber_name": name}

    def register(self, one: Any, name: str = "me") -> int:
        answer = self.call("CdcRegister", **self.of(one, name))
        assert not answer.HasField("error"), answer
        return int(answer.init_snapshot_version)

    def log(self, one: Any, after: int, **more: Any) -> Any:
        return self.call("CdcPullLog", last_log_index=after, **self.of(one), **more)

    def rows(self, one: Any, version: int, **more: Any) -> Any:
        return self.call("CdcPullSnapshot", current_snapshot_version=version, **self.of(one), **more)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Whole]:
    settings = {"log": LogConfig(flush_ms=5, retention_events=200)}
    with Whole(tmp_path / "data", pull=PullConfig(target_bytes=1 << 20), **settings) as made:
        made.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v)")
        made.run(ROWS)
        yield made


@pytest.fixture
def puller(files: Whole) -> Iterator[Puller]:
    with serving(files) as client:
        made = Puller(client)
        yield made
        made.channel.close()


def test_proto_names_and_numbers_match_the_original() -> None:
    for name, fields in NUMBERS.items():
        described = message(f"headwater.v1.{name}").DESCRIPTOR
        assert {each.name: (each.number, each.type) for each in described.fields if each.name in fields} == fields
    kinds = message("headwater.v1.CdcChangeData").DESCRIPTOR.enum_types_by_name["ChangeType"]
    assert {each.name: each.number for each in kinds.values} == {"WRITE": 0, "DELETE": 1}


def test_rows_are_paged_and_the_last_page_is_marked(puller: Puller) -> None:
    (one,) = puller.ranges()
    version = puller.register(one)
    found, last, pages = [], b"", 0
    while True:
        answer = puller.rows(one, version, last_key=last, limit=25)
        found += [json.loads(each.value) for each in answer.snapshot_data]
        assert answer.current_snapshot_version == version
        pages += 1
        if answer.end:
            break
        last = answer.snapshot_data[-1].key
    assert pages == 3 and found == [{"k": k, "v": f"row {k}"} for k in range(1, 61)]
    assert answer.snapshot_data[-1].key == encode_key((60,))


def test_snapshot_rows_exclude_later_changes(puller: Puller, files: Whole) -> None:
    (one,) = puller.ranges()
    version = puller.register(one)
    files.run("DELETE FROM t WHERE k > 3")
    files.run("INSERT INTO t VALUES (100, 'late')")
    assert [json.loads(each.value)["k"] for each in puller.rows(one, version).snapshot_data] == list(range(1, 61))


def test_changes_have_old_rows_and_transaction_marks(puller: Puller, files: Whole) -> None:
    (one,) = puller.ranges()
    version = puller.register(one)
    files.run("UPDATE t SET v = 'x' WHERE k IN (1, 2)")
    files.run("UPDATE t SET k = 99 WHERE k = 3")
    files.run("DELETE FROM t WHERE k = 4")
    answer = puller.log(one, version)
    told = [
        (
            each.type,
            each.op,
            each.key,
            json.loads(each.before_value or "null"),
            json.loads(each.value or "null"),
            each.offset - version,
            each.txn_last,
        )
        for each in answer.log_data
    ]
    row = {k: {"k": k, "v": f"row {k}"} for k in range(1, 5)}
    key = {k: encode_key((k,)) for k in (1, 2, 3, 4, 99)}
    assert told == [
        (0, 2, key[1], row[1], {"k": 1, "v": "x"}, 1, False),
        (0, 2, key[2], row[2], {"k": 2, "v": "x"}, 2, True),
        (1, 3, key[3], row[3], None, 3, False),
        (0, 1, key[99], None, {"k": 99, "v": "row 3"}, 3, True),
        (1, 3, key[4], row[4], None, 4, True),
    ]
    assert answer.current_log_index == version + 4
    ids = [each.txn_id for each in answer.log_data]
    assert ids[0] == ids[1] != ids[2] == ids[3] != ids[4]
    assert len({each.ts for each in answer.log_data}) == 3


def test_log_page_may_split_a_transaction_and_marks_its_end(puller: Puller, files: Whole) -> None:
    (one,) = puller.ranges()
    after = puller.register(one)
    files.run("UPDATE t SET v = 'x' WHERE k <= 10")
    marks = []
    for _ in range(4):
        answer = puller.log(one, after, limit=3)
        marks += [each.txn_last for each in answer.log_data]
        after = answer.current_log_index
    assert marks == [False] * 9 + [True]


def test_pull_of_a_range_returns_only_rows_and_changes_of_its_keys(puller: Puller, files: Whole) -> None:
    (one,) = puller.ranges()
    puller.client.ok("pull.split", table="t", range=one.id, epoch=1, at=encode_key((31,)).hex())
    low, high = puller.ranges()
    version = puller.register(low)
    puller.register(high)
    files.run("UPDATE t SET k = k + 100 WHERE k = 30")
    files.run("UPDATE t SET v = 'x' WHERE k IN (1, 40)")
    seen = [
        [(each.type, each.key, each.txn_last) for each in puller.log(each, version).log_data] for each in (low, high)
    ]
    assert seen == [
        [(1, encode_key((30,)), True), (0, encode_key((1,)), True)],
        [(0, encode_key((130,)), True), (0, encode_key((40,)), True)],
    ]
    assert [len(puller.rows(each, version).snapshot_data) for each in (low, high)] == [30, 30]


def test_stale_epoch_returns_the_current_ranges(puller: Puller) -> None:
    (one,) = puller.ranges()
    puller.client.ok("pull.split", table="t", range=one.id, epoch=1, at=encode_key((31,)).hex())
    now = puller.ranges()
    for answer in (puller.call("CdcRegister", **puller.of(one)), puller.rows(one, 0), puller.log(one, 0)):
        assert list(answer.error.stale_epoch.ranges) == now and "was replaced" in answer.error.detail
    other = {"conf_ver": 1, "version": now[0].range_epoch.version}
    answer = puller.call("CdcRegister", range_id=one.id, range_epoch=other, subscriber_name="me")
    assert answer.error.HasField("stale_epoch")
    assert puller.call("CdcRegister", range_id=one.id, subscriber_name="me").error.HasField("stale_epoch")


@pytest.mark.parametrize("id", [0, 999, 2**64 - 1])
def test_unknown_range_is_not_found(puller: Puller, id: int) -> None:
    puller.ranges()
    for method in ("CdcRegister", "CdcPullSnapshot", "CdcPullLog"):
        answer = puller.call(method, range_id=id, subscriber_name="me")
        assert answer.error.range_not_found.range_id == id


def test_keys_outside_the_range_are_out_of_bound(puller: Puller) -> None:
    (one,) = puller.ranges()
    puller.client.ok("pull.split", table="t", range=one.id, epoch=1, at=encode_key((31,)).hex())
    low, high = puller.ranges()
    version = puller.register(low)
    for field in ("last_key", "start_key"):
        error = puller.rows(low, version, **{field: encode_key((50,))}).error.out_of_bound
        assert (error.key, error.range_id, error.end_key) == (encode_key((50,)), low.id, low.end_key)
    assert puller.rows(high, version, end_key=encode_key((2,))).error.HasField("out_of_bound")
    part = puller.rows(low, version, start_key=encode_key((3,)), end_key=encode_key((6,)))
    assert [json.loads(each.value)["k"] for each in part.snapshot_data] == [3, 4, 5] and part.end


def test_unregistered_subscriber_gets_no_rows(puller: Puller) -> None:
    (one,) = puller.ranges()
    version = puller.register(one, "me")
    answer = puller.call("CdcPullSnapshot", current_snapshot_version=version, **puller.of(one, "you"))
    assert answer.error.not_owner.subscriber_name == "you"
    puller.client.ok("pull.release", table="t", subscriber="me")
    assert puller.rows(one, version).error.HasField("not_owner")


def test_evicted_log_is_reported(puller: Puller, files: Whole) -> None:
    (one,) = puller.ranges()
    version = puller.register(one)
    puller.client.ok("pull.release", table="t", subscriber="me")
    for number in range(4):
        files.run(f"UPDATE t SET v = {number}")
    assert files.database("main").catch_up(20)
    latest = files.database("main").log.flush()
    error = puller.log(one, version).error.horizon_exceeded
    assert (error.latest_log_index, error.reason) == (latest, "wal_horizon_exceeded")
    assert error.earliest_log_index == latest - 199
    puller.register(one)
    assert puller.rows(one, version).error.snapshot_expired.reason == "wal_horizon_exceeded"
    assert puller.log(one, latest + 5).error.horizon_exceeded.reason == "log_generation_changed"


def test_lease_of_another_caller_is_not_owned(files: Whole, tmp_path: Path) -> None:
    with serving(files, token=Secret("t"), folder=tmp_path) as client:
        client.http.headers["authorization"] = "Bearer t"
        ann, bob = (
            Puller(client, (("x-api-key", client.ok("security.token.create", name=name, role="viewer")["token"]),))
            for name in ("ann", "bob")
        )
        (one,) = ann.ranges()
        version = ann.register(one)
        error = bob.call("CdcRegister", **bob.of(one)).error
        assert (error.server_error.code, error.server_error.retryable) == ("conflict", False)
        assert bob.rows(one, version).error.not_owner.subscriber_name == "me"
        assert ann.rows(one, version).end and bob.register(one, "another") == version
        for each in (ann, bob):
            each.channel.close()


def test_pull_of_an_altered_table_continues_after_the_last_key_at_a_new_snapshot_version(
    puller: Puller, files: Whole
) -> None:
    (one,) = puller.ranges()
    version = puller.register(one)
    first = puller.rows(one, version, limit=10)
    files.run("UPDATE t SET v = 'x' WHERE k IN (5, 50)")
    files.run("ALTER TABLE t ADD COLUMN w")
    told = [puller.rows(one, version).error.WhichOneof("err") for _ in range(2)]
    assert told == ["stale_epoch", "range_not_found"]  # another shape is cut anew: what was is soon forgotten
    (one,) = puller.ranges()
    rest = puller.rows(one, version, last_key=first.snapshot_data[-1].key)
    assert rest.current_snapshot_version > version and rest.end
    values = {each.key: json.loads(each.value) for each in (*first.snapshot_data, *rest.snapshot_data)}
    assert len(values) == 60 and values[encode_key((50,))]["v"] == "x" and values[encode_key((5,))]["v"] == "row 5"
    for change in puller.log(one, version).log_data:
        if change.key <= first.snapshot_data[-1].key or change.offset > rest.current_snapshot_version:
            values[change.key] = json.loads(change.value)
    assert {each["k"]: each["v"] for each in values.values()} == dict(files.rows("SELECT k, v FROM t"))


def test_replaced_table_needs_a_new_snapshot(puller: Puller, files: Whole) -> None:
    (one,) = puller.ranges()
    version = puller.register(one)
    files.run("UPDATE t SET v = 'x' WHERE k = 1")
    files.run("DROP TABLE t")
    files.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v)")
    (one,) = puller.ranges()
    answer = puller.log(one, version)
    assert [each.key for each in answer.log_data] == [encode_key((1,))] and answer.current_log_index == version + 1
    assert puller.log(one, version + 1).error.snapshot_expired.reason == "table_dropped"


def test_open_transaction_does_not_block_pulls(puller: Puller, files: Whole) -> None:
    (one,) = puller.ranges()
    version = puller.register(one)
    opened = puller.client.ok("tx.begin")["tx"]
    puller.client.ok("sql.exec", sql="UPDATE t SET v = 'open' WHERE k = 1", tx=opened)
    assert puller.register(one) == version
    assert len(puller.rows(one, version).snapshot_data) == 60
    assert not puller.log(one, version).log_data
    puller.client.ok("tx.rollback", tx=opened)
    files.run("UPDATE t SET v = 'done' WHERE k = 2")
    assert [each.key for each in puller.log(one, version).log_data] == [encode_key((2,))]


def test_log_pull_waits_for_new_changes(puller: Puller, files: Whole) -> None:
    (one,) = puller.ranges()
    version = puller.register(one)
    fields = {**puller.of(one), "last_log_index": version, "wait_ms": 30_000}
    answer = message("headwater.v1.CdcPullLogResponse")
    call = puller.channel.unary_unary(
        "/headwater.v1.PullService/CdcPullLog", response_deserializer=answer.FromString
    ).future(message("headwater.v1.CdcPullLogRequest")(**fields).SerializeToString(), timeout=PATIENCE)
    while not files.database("main").log.has_listeners:
        assert not call.done()
    files.run("UPDATE t SET v = 'x' WHERE k = 1")
    assert len(call.result().log_data) == 1


@pytest.mark.parametrize(
    "method, fields",
    [
        ("CdcRegister", {"subscriber_name": ""}),
        ("CdcRegister", {"subscriber_name": "x" * 201}),
        ("CdcPullSnapshot", {"subscriber_name": "me", "limit": 2001}),
        ("CdcPullLog", {"subscriber_name": "me", "limit": 2001}),
        ("CdcPullLog", {"subscriber_name": "me", "wait_ms": 60_001}),
        ("CdcPullLog", {"subscriber_name": "me", "last_log_index": 2**63}),
        ("ListRanges", {"table": "absent"}),
    ],
)
def test_invalid_request_is_refused_by_status(puller: Puller, method: str, fields: dict[str, Any]) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        puller.call(method, **fields)
    wanted = {
        "limit": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "table": grpc.StatusCode.NOT_FOUND,
    }
    assert failure.value.code() is wanted.get(list(fields)[-1], grpc.StatusCode.INVALID_ARGUMENT)


def test_oversized_range_target_is_refused(puller: Puller) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        puller.ranges(target_bytes=2**63)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
