"""Both clients against a faulty server: nothing twice, nothing lost, and an error once retries are used up."""

import json
import random
import socket
import ssl
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.client.both_clients import ask_sync
from tests.client.faulty_server import ARROW, Asked, Faulty, Reply, arrow_body, failure, problem, result
from tests.suite.deadlines import PATIENCE

from headwater.client import AsyncClient, Client, Range
from headwater.client.http_connections import Connections
from headwater.client.protocol import Request, parse_url, rpc_result
from headwater.errors import (
    Busy,
    ConfigError,
    Conflict,
    HeadwaterError,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    OffsetExpired,
    TxExpired,
    Unauthorized,
    Unavailable,
)
from headwater.model.keys.key import Span
from headwater.serve.http import transport_frames

ROWS = 400
SCHEMA = pa.schema([("id", pa.int64())], metadata={"version": "2"})


def key(id: int) -> bytes:
    return id.to_bytes(2, "big")


def rows_body(ids: list[int], size: int = 30, **more: Any) -> bytes:
    pages = [ids[start : start + size] for start in range(0, len(ids), size)]
    batches = [(batch_of(page), {"last_key": key(page[-1]).hex()}) for page in pages]
    return arrow_body(SCHEMA, batches, **more)


def batch_of(ids: list[int]) -> pa.RecordBatch:
    return pa.record_batch([pa.array(ids, pa.int64())], schema=SCHEMA)


def ids_of(batches: list[pa.RecordBatch]) -> list[int]:
    return [id for batch in batches for id in batch.column("id").to_pylist()]


def snapshot(client: Any) -> Any:
    return client.snapshot("main", "t", version="g.7")


class Table:
    """Rows 0 to ROWS by key, served with faults drawn from `fate`."""

    def __init__(self, fate: random.Random, *, ranges: bool = False) -> None:
        self._fate = fate
        self.ranges = [Range(1, 1, Span.all())] if ranges else []

    def __call__(self, asked: Asked) -> Reply:
        query = asked.query
        assert query["version"] == "g.7"
        match self._fate.randrange(6):
            case 0:
                return problem(503, "unavailable", retryable=True)
            case 1:
                return Reply(never=True)
            case 2 if self.ranges:
                self._split()
        within = Span.all()
        if self.ranges:
            found = [r for r in self.ranges if (r.id, r.epoch) == (int(query["range"]), int(query["epoch"]))]
            if not found:
                return problem(409, "stale_epoch", ranges=[wire(r) for r in self.ranges])
            within = found[0].span
        after = bytes.fromhex(query.get("after", ""))
        left = [id for id in range(ROWS) if within.contains(key(id)) and (not after or key(id) > after)]
        body = rows_body(left)
        return Reply(body, kind=ARROW, cut=self._fate.choice([None, self._fate.randrange(len(body))]))

    def _split(self) -> None:
        old = self._fate.choice(self.ranges)
        at = key(self._fate.randrange(1, ROWS))
        if old.span.contains(at) and old.span.start < at:
            self.ranges.remove(old)
            left = Range(old.id, old.epoch + 1, Span(old.span.start, at))
            right = Range(max(r.id for r in [old, *self.ranges]) + 1, old.epoch + 1, Span(at, old.span.end))
            self.ranges = sorted([*self.ranges, left, right], key=lambda r: r.span.start)


def wire(range: Range) -> dict[str, Any]:
    end = {} if range.span.end is None else {"end": range.span.end.hex()}
    return {"id": range.id, "epoch": range.epoch, "start": range.span.start.hex(), **end}


# --- rows ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranges", [False, True], ids=["span", "ranges"])
def test_snapshot_over_a_breaking_connection_delivers_every_row_once(
    faulty: Faulty, ask: Any, seed: int, ranges: bool
) -> None:
    faulty.answer = table = Table(random.Random(seed), ranges=ranges)
    known = list(table.ranges)
    found = ask(faulty.url, lambda client: client.snapshot("main", "t", version="g.7", ranges=known))
    assert ids_of(found) == list(range(ROWS))
    assert len(faulty.asked) > 1


def test_body_without_its_end_mark_is_continued_by_a_second_request(faulty: Faulty, ask: Any) -> None:
    faulty.replies = [Reply(rows_body([0, 1, 2], end=False), kind=ARROW), Reply(rows_body([3]), kind=ARROW)]
    assert ids_of(ask(faulty.url, snapshot)) == [0, 1, 2, 3]
    assert faulty.asked[1].query["after"] == key(2).hex()


def test_body_cut_after_its_end_mark_is_accepted(faulty: Faulty, ask: Any) -> None:
    body = rows_body([0, 1])
    faulty.replies = [Reply(body, kind=ARROW, cut=len(body))]
    assert ids_of(ask(faulty.url, snapshot)) == [0, 1]


def test_empty_table_is_returned_with_its_schema(faulty: Faulty, ask: Any) -> None:
    faulty.replies = [Reply(rows_body([]), kind=ARROW)]
    (only,) = ask(faulty.url, snapshot)
    assert only.num_rows == 0 and only.schema == SCHEMA


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (problem(400, "invalid_request"), InvalidRequest),
        (problem(401, "unauthorized"), Unauthorized),
        (problem(404, "not_found"), NotFound),
        (problem(409, "conflict", resnapshot_reason="schema_changed"), Conflict),
        (problem(410, "resnapshot_required", earliest_offset=5, latest_offset=9, resnapshot_reason="r"), OffsetExpired),
    ],
)
def test_refused_pull_is_not_retried(faulty: Faulty, ask: Any, reply: Reply, kind: type[HeadwaterError]) -> None:
    body = rows_body([0, 1, 2])
    faulty.replies = [Reply(body, kind=ARROW, cut=len(body) - 8), reply]
    with pytest.raises(kind) as raised:
        ask(faulty.url, snapshot)
    assert type(raised.value) is kind
    told = json.loads(reply.body)
    assert raised.value.extra == {name: told[name] for name in told if name not in ("type", "title", "status", "code")}
    assert len(faulty.asked) == 2


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Reply(never=True), Unavailable),
        (problem(429, "limit_exceeded", "full"), LimitExceeded),
        (Reply(status=502), Unavailable),
    ],
)
def test_pull_without_progress_fails_with_the_last_error(
    faulty: Faulty, ask: Any, reply: Reply, kind: type[HeadwaterError]
) -> None:
    faulty.answer = lambda asked: reply
    with pytest.raises(kind):
        ask(faulty.url, snapshot, patience=2.0)
    assert len(faulty.asked) > 1


@pytest.mark.slow
def test_pull_that_receives_rows_is_retried_beyond_its_patience(faulty: Faulty, ask: Any) -> None:
    """A connection that breaks after every batch takes longer than the patience, and still completes."""

    def answer(asked: Asked) -> Reply:
        first = int(asked.query.get("after", "ffff"), 16) + 1 & 0xFFFF
        whole = rows_body(list(range(first, 20)), 1)
        return Reply(whole, kind=ARROW, cut=len(rows_body([first], 1)) - 8 if first < 20 else None)

    faulty.answer = answer
    assert ids_of(ask(faulty.url, snapshot, patience=1.0)) == list(range(20))


def test_interrupted_log_slice_continues_after_its_last_offset(faulty: Faulty, ask: Any) -> None:
    first = arrow_body(SCHEMA, [(batch_of([1, 2]), {"upto": "40"}), (batch_of([]), {"upto": "50"})], end=False)
    faulty.replies = [
        Reply(first, kind=ARROW, cut=len(first)),
        problem(503, "unavailable", retryable=True),
        Reply(arrow_body(SCHEMA, [(batch_of([3]), {"upto": "90"})]), kind=ARROW),
    ]
    found = ask(faulty.url, lambda client: client.log("main", "t", generation="g", after=10, upto=90, where="id > 0"))
    assert ids_of(found) == [1, 2, 3]
    assert faulty.asked[0].path == "/api/v1/pull/main/t/log"
    always = {"upto": "90", "generation": "g", "where": "id > 0", "compression": "lz4"}
    assert faulty.asked[0].query == {"after": "10", **always}
    assert faulty.asked[2].query == {"after": "50", "shape": "2", **always}


def test_log_of_several_tables_is_requested_from_its_own_route(faulty: Faulty, ask: Any) -> None:
    faulty.answer = lambda asked: Reply(arrow_body(SCHEMA, []), kind=ARROW)
    for tables in (["a", "b"], []):
        ask(faulty.url, lambda client, t=tables: client.log_tables("main", t, generation="g", after=1, upto=9))
    assert [one.path for one in faulty.asked] == ["/api/v1/pull/main/log"] * 2
    assert [one.query["tables"] for one in faulty.asked] == ["a,b", "*"]


def test_snapshot_abandoned_midway_returns_its_first_batch(faulty: Faulty, ask: Any) -> None:
    faulty.answer = lambda asked: Reply(rows_body(list(range(ROWS))), kind=ARROW)
    (first,) = ask(faulty.url, snapshot, first=1)
    assert first.num_rows == 30


def test_connections_are_reused_between_requests(faulty: Faulty, ask: Any) -> None:
    faulty.answer = lambda asked: Reply(rows_body([1]), kind=ARROW) if asked.method == "GET" else result(1)

    def three(client: Client) -> None:
        client.call("system.ping")
        assert list(snapshot(client))
        client.call("system.ping")

    async def three_async(client: AsyncClient) -> None:
        await client.call("system.ping")
        assert [batch async for batch in snapshot(client)]
        await client.call("system.ping")

    ask(faulty.url, three if ask is ask_sync else three_async)
    assert len(faulty.asked) == 3
    assert faulty.connections == 1


# --- calls -----------------------------------------------------------------------------------------------


def call(method: str, **params: Any) -> Any:
    return lambda client: client.call(method, **params)


@pytest.mark.slow
def test_read_with_a_lost_answer_is_retried(faulty: Faulty, ask: Any) -> None:
    whole = result({"row": 1})
    faulty.replies = [Reply(never=True), whole._replace(cut=9), Reply(b"<html>", 502, "text/html"), whole]
    assert ask(faulty.url, call("data.get", pk=[1])) == {"row": 1}
    assert len(faulty.asked) == 4


@pytest.mark.parametrize("reply", [Reply(never=True), result(1, cut=9), Reply(b"<html>", 502, "text/html")])
def test_write_with_a_lost_answer_is_not_retried(faulty: Faulty, ask: Any, reply: Reply) -> None:
    faulty.replies = [reply, result("twice")]
    with pytest.raises(Unavailable):
        ask(faulty.url, call("data.insert"))
    assert len(faulty.asked) == 1


def test_write_refused_as_retryable_is_retried(faulty: Faulty, ask: Any) -> None:
    faulty.replies = [failure("busy", retryable=True), result({"affected": 1})]
    assert ask(faulty.url, call("data.insert")) == {"affected": 1}


@pytest.mark.parametrize(("code", "kind"), [("busy", Busy), ("tx_expired", TxExpired)])
def test_refused_write_inside_a_transaction_is_not_retried(faulty: Faulty, ask: Any, code: str, kind: Any) -> None:
    faulty.replies = [failure(code, retryable=True)]
    with pytest.raises(kind):
        ask(faulty.url, call("data.insert", tx="tx_1"))


def test_connection_closed_between_requests_loses_no_write(faulty: Faulty, ask: Any) -> None:
    faulty.answer = lambda asked: result(len(faulty.asked), hang_up=True)
    found: list[int] = []

    def insert(client: Client) -> None:
        for _ in range(3):
            found.append(client.call("data.insert"))
            assert faulty.hung_up.acquire(timeout=PATIENCE)

    async def insert_async(client: AsyncClient) -> None:
        for _ in range(3):
            found.append(await client.call("data.insert"))
            assert faulty.hung_up.acquire(timeout=PATIENCE)

    ask(faulty.url, insert if ask is ask_sync else insert_async)
    assert found == [1, 2, 3]


def test_reused_connection_is_checked_before_its_next_request(faulty: Faulty) -> None:
    """Sending on a connection that the server has closed may raise no error, so the client checks it before."""
    faulty.answer = lambda asked: result(len(faulty.asked), hang_up=True)
    with closing(Connections(parse_url(faulty.url), None, 10, None)) as connections:
        for number in (1, 2):
            status, headers, body = connections.exchange(Request("GET", "/", {}))
            assert rpc_result(status, headers, body) == number
            assert faulty.hung_up.acquire(timeout=PATIENCE)


def test_unreachable_server_is_reported_with_its_url_after_the_patience(ask: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unavailable, match=f"no server answers at http://127.0.0.1:{port}"):
        ask(f"http://127.0.0.1:{port}", call("data.insert"), patience=0.2)


def test_silent_server_is_reported_as_unavailable(ask: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unavailable):
        ask(f"http://127.0.0.1:{silent.getsockname()[1]}", call("system.ping"), timeout=0.05, patience=0.2)


def test_malformed_answer_raises_a_headwater_error(faulty: Faulty, ask: Any) -> None:
    faulty.replies = [result({"generation": 5})]
    with pytest.raises(HeadwaterError, match="cannot be read"):
        ask(faulty.url, lambda client: client.describe("main", "t"))


# --- feeds -----------------------------------------------------------------------------------------------

EVENTS = "text/event-stream"


def change(offset: int, word: str = "insert", **more: Any) -> bytes:
    return transport_frames.sse(offset, word, json.dumps({"op": word, "offset": offset, **more}).encode())


def test_broken_feed_is_resumed_after_its_last_change(faulty: Faulty, ask: Any) -> None:
    opening = transport_frames.sse_opening(0)
    body = opening + change(1) + change(2)
    faulty.replies = [
        Reply(body, kind=EVENTS, cut=len(body) - 5),  # in the midst of the second change
        problem(503, "unavailable", retryable=True),
        Reply(opening + change(2) + transport_frames.SSE_FAREWELL, kind=EVENTS),
        Reply(opening + change(3), kind=EVENTS),
    ]
    found = ask(faulty.url, lambda client: client.changes("main", "t", start="earliest"), first=3)
    assert [one["offset"] for one in found] == [1, 2, 3]
    assert [one.headers.get("last-event-id") for one in faulty.asked] == [None, "1", "1", "2"]
    assert faulty.asked[0].query == {"format": "plain_json", "start": "earliest"}


def test_feed_that_never_recovers_raises_unavailable(faulty: Faulty, ask: Any) -> None:
    faulty.answer = lambda asked: Reply(
        transport_frames.SSE_OPENING, kind=EVENTS, cut=len(transport_frames.SSE_OPENING)
    )
    with pytest.raises(Unavailable):
        ask(faulty.url, lambda client: client.changes("main", "t"), patience=0.3)


def test_follow_resnapshots_after_an_expired_offset_or_a_schema_change(faulty: Faulty, ask: Any) -> None:
    def row(id: int) -> bytes:
        data = {"op": "insert", "snapshot": True, "after": {"id": id}}
        return transport_frames.sse(f"s:{id}", "insert", json.dumps(data).encode())

    gone = {"earliest_offset": 8, "latest_offset": 9, "reason": "wal_horizon_exceeded"}
    end = transport_frames.sse(5, "snapshot_end", b"{}")
    faulty.replies = [
        Reply(row(1) + end + change(6) + transport_frames.sse(7, "resnapshot", json.dumps(gone).encode()), kind=EVENTS),
        Reply(row(2) + end + change(9, "schema_change", resnapshot=True), kind=EVENTS),
        Reply(row(3), kind=EVENTS),
    ]
    found = ask(faulty.url, lambda client: client.follow("main", "t", where="id > 0"), first=7)
    assert [(word, what if word != "change" else what["offset"]) for word, what in found] == [
        ("row", {"id": 1}),
        ("change", 6),
        ("resnapshot", "wal_horizon_exceeded"),
        ("row", {"id": 2}),
        ("change", 9),
        ("resnapshot", "schema_changed"),
        ("row", {"id": 3}),
    ]
    assert all(one.query["start"] == "snapshot" and "last-event-id" not in one.headers for one in faulty.asked)


@pytest.mark.parametrize("filters", [{"start": "latest"}, {"upto": 3}, {"format": "debezium_json"}])
def test_follow_with_a_reserved_filter_is_refused_without_a_request(
    faulty: Faulty, ask: Any, filters: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest):
        ask(faulty.url, lambda client: client.follow("main", "t", **filters))
    assert faulty.asked == []


# --- credentials -----------------------------------------------------------------------------------------


def test_token_is_sent_with_every_request_and_never_shown(
    faulty: Faulty, ask: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    faulty.answer = lambda asked: problem(401, "unauthorized") if asked.method == "GET" else failure("unauthorized")
    shown: list[str] = []
    for one in (call("system.ping"), snapshot, lambda client: client.changes("main")):

        def noted(client: Any, one: Any = one) -> Any:
            shown.append(repr(client) + str(client))
            return one(client)

        with pytest.raises(Unauthorized) as raised:
            ask(faulty.url, noted, token="hunter2")
        shown.append(repr(raised.value) + repr(raised.value.details))
    assert [asked.headers["authorization"] for asked in faulty.asked] == ["Bearer hunter2"] * 3
    assert "hunter2" not in "".join(shown) + caplog.text


def test_token_from_the_environment_or_a_file_is_sent(
    faulty: Faulty, ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty.answer = lambda asked: result(1)
    monkeypatch.setenv("HEADWATER_TOKEN", "from-environment")
    (tmp_path / "token").write_text("from-file\n")
    ask(faulty.url, call("system.ping"))
    ask(faulty.url, call("system.ping"), token_file=tmp_path / "token")
    assert [one.headers["authorization"] for one in faulty.asked] == ["Bearer from-environment", "Bearer from-file"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one file with a key and a self-signed certificate for localhost."""
    folder = tmp_path_factory.mktemp("tls")
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    command = ["openssl", *words.split(), "-keyout", str(folder / "key"), "-out", str(folder / "certificate")]
    subprocess.run(command, check=True, capture_output=True)
    both = folder / "both"
    both.write_text((folder / "key").read_text() + (folder / "certificate").read_text())
    return both


def test_https_accepts_only_a_trusted_certificate(certificate: Path, ask: Any) -> None:
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(certificate)
    with Faulty(own) as server:
        server.answer = lambda asked: result("safe") if asked.method == "POST" else Reply(rows_body([1]), kind=ARROW)
        trusted = ssl.create_default_context(cafile=certificate)
        assert ask(server.url, call("system.ping"), tls=trusted) == "safe"
        assert ids_of(ask(server.url, snapshot, tls=trusted)) == [1]
        with pytest.raises(ConfigError, match="not trusted"):
            ask(server.url, call("system.ping"))


def test_scheme_mismatch_is_refused_with_a_hint_to_the_other_scheme(
    faulty: Faulty, certificate: Path, ask: Any
) -> None:
    with pytest.raises(ConfigError, match="does not speak TLS") as plain:
        ask(faulty.url.replace("http", "https"), call("system.ping"))
    assert plain.value.hint == f"Write {faulty.url}."
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(certificate)
    with Faulty(own) as server, pytest.raises(Unavailable) as secret:
        ask(server.url.replace("https", "http"), call("system.ping"), patience=0.0)
    assert server.url in secret.value.hint
