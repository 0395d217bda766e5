"""The table METRICS and the exposed metrics are the same."""

import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from tests.queries.open_databases import Whole
from tests.serve.grpc_calls import KV, calling
from tests.serve.server_fixture import serving
from tests.suite.deadlines import PATIENCE
from websockets.sync.client import connect

from headwater.database import DatabaseStatus
from headwater.serve.metrics.metrics import METRICS, Metrics
from headwater.serve.rpc.methods import METHODS

FULL = DatabaseStatus(
    ready=True,
    generation="g1",
    horizon=1,
    latest=3,
    log_bytes=4096,
    retention_changes=10,
    lag_changes=0,
    lag_seconds=0.0,
    capture_rows=2,
    writes=7,
)
UNKNOWN = DatabaseStatus(ready=False, generation="g", horizon=1, latest=0)


def exposed(metrics: Metrics) -> dict[str, str]:
    return families(metrics.text().decode())


def families(text: str) -> dict[str, str]:
    return {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created") and family.samples
    }


def test_exposed_metrics_are_exactly_those_of_the_table(tmp_path: Path) -> None:
    with Whole(tmp_path) as whole, serving(whole) as client:
        client.ok("sql.exec", sql="CREATE TABLE t (id INTEGER PRIMARY KEY)")
        client.ok("query.select", sql="SELECT id FROM t")
        with calling(client) as caller:
            caller.call(f"{KV}/Get", key=b"k")
        with connect(str(client.http.base_url).replace("http", "ws", 1) + "/api/v1/ws", proxy=None) as socket:
            socket.send('{"id": "1", "type": "ping"}')
            socket.recv(timeout=PATIENCE)
        text = client.http.get("/metrics").text
        slots = {name for name in METRICS if name.startswith("headwater_slot_")}  # of PostgreSQL: test_pg_slot_monitor
        assert families(text) == {name: kind for name, (kind, _, _) in METRICS.items() if name not in slots}


def test_query_metrics_count_requests(tmp_path: Path) -> None:
    with Whole(tmp_path) as whole, serving(whole) as client:
        client.ok("sql.exec", sql="CREATE TABLE t (id INTEGER PRIMARY KEY)")
        path = f"/api/v1/q/{client.ok('query.prepare', sql='SELECT a.id FROM t a JOIN t b')['query_id']}"
        while "etag" not in client.http.get(path).headers:  # right after a change of the schema there is none
            time.sleep(0.01)
        before = numbers(client.http.get("/metrics").text)
        tag = client.http.get(path).headers["etag"]
        asked = [client.http.get(path, headers={"if-none-match": each}).status_code for each in (tag, tag, tag, '"no"')]
        after = numbers(client.http.get("/metrics").text)
    assert asked == [304, 304, 304, 200]
    assert after["headwater_query_not_modified_total"] == 3.0
    assert after["headwater_etag_hit_rate"] == 3 / 4
    assert after["headwater_304_rate"] == 3 / (before["headwater_query_requests_total"] + 5)
    assert 0 < after["headwater_avg_etag_compute_time"] < 1
    assert after["headwater_query_dependency_size"] == 2.0  # places of a table


def numbers(text: str) -> dict[str, float]:
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_unknown_values_are_absent_from_metrics() -> None:
    text = Metrics(lambda: {"main": UNKNOWN}).text().decode()
    for name in ("capture_lag_changes", "capture_lag_seconds", "log_bytes", "writes_total"):
        assert f"headwater_{name}{{" not in text


def test_requests_of_unknown_methods_are_counted_together() -> None:
    metrics = Metrics(dict, methods=METHODS)
    for place in range(100):
        metrics.answered(f"guess.{place}", "not_supported", 0.001)
    text = metrics.text().decode()
    assert 'headwater_rpc_requests_total{code="not_supported",method="unknown"} 100.0' in text
    assert "guess" not in text


def test_uptime_follows_the_clock() -> None:
    now = [5.0]
    metrics = Metrics(dict, clock=lambda: now[0])
    now[0] = 12.5
    assert "headwater_uptime_seconds 7.5" in metrics.text().decode()


def test_two_servers_in_one_process_do_not_share_numbers() -> None:
    one, other = Metrics(dict, methods=METHODS), Metrics(dict, methods=METHODS)
    one.answered("system.ping", "ok", 0.001)
    assert "system.ping" not in other.text().decode()


def test_metric_names_have_the_prefix_base_units_and_counter_suffix() -> None:
    for name, (kind, text, _) in METRICS.items():
        assert name.startswith("headwater_") and text.endswith(".")
        assert (kind == "counter") == name.endswith("_total")
        assert not name.endswith(("_ms", "_kb", "_mb"))
