"""Prometheus metrics: requests are counted when answered, log and capture are read at each scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headwater import __version__
from headwater.database import DatabaseStatus
from headwater.feeds.feeds import Feeds
from headwater.queries.queries import Queries
from headwater.serve.http.handlers.pulls import Pulls
from headwater.serve.limits.limits import Limits
from headwater.serve.metrics.changefeed_metrics import CHANGEFEED_METRICS
from headwater.serve.metrics.changefeed_metrics import ChangefeedCounters as Changefeeds
from headwater.serve.metrics.query_metrics import QUERY_METRICS, asked

Status = Callable[[], dict[str, DatabaseStatus]]

SERVER_METRICS: dict[str, tuple[str, tuple[str, ...]]] = {  # name -> help, labels
    "headwater_info": ("Always 1; the version as a label.", ("version",)),
    "headwater_uptime_seconds": ("Time since the server started.", ()),
    "headwater_rpc_requests_total": ("RPC requests answered.", ("method", "code")),
    "headwater_rpc_request_seconds": ("Time to answer an RPC request.", ("method",)),
    "headwater_http_responses_total": ("HTTP responses sent.", ("route", "status")),
    "headwater_grpc_calls_total": ("gRPC calls that ended.", ("method", "status")),
    "headwater_requests_total": ("Accepted requests for a database.", ("db",)),
    "headwater_limited_total": (
        "Requests refused by a limit: of the caller, of connections, or of the database by rate or streams.",
        ("limit", "db"),
    ),
    "headwater_connections": ("Open connections to HTTP, WebSockets included.", ()),
    "headwater_gateway_messages_total": ("Messages answered by the JSON gateway.", ("type", "code")),
    "headwater_capture_failed": ("1 while capture is stopped by an error.", ("db",)),
    "headwater_slot_wal_status": ("Always 1; the state of the slot as a label.", ("db", "wal_status")),
    "headwater_log_generation_info": ("Always 1; the generation as a label.", ("db", "generation")),
    "headwater_streams": ("Open streams.", ("transport",)),
    "headwater_polls": ("Polls being answered or waiting.", ()),
    "headwater_delivered_changes_total": ("Changes and snapshot rows sent on streams.", ("transport",)),
    "headwater_database_streams": ("Open streams, bulk reads and waiting polls of a database.", ("db",)),
    "headwater_database_delivered_changes_total": ("Changes and snapshot rows sent on streams of a database.", ("db",)),
}
DATABASE_METRICS = {  # name -> help, field of DatabaseStatus
    "headwater_ready": ("1 once the database has its first capture position.", "ready"),
    "headwater_writes_total": ("Transactions committed through the server.", "writes"),
    "headwater_capture_lag_changes": ("Changes committed and not yet in the log.", "lag_changes"),
    "headwater_capture_lag_seconds": ("Age of the oldest change not yet in the log.", "lag_seconds"),
    "headwater_capture_table_rows": ("Rows waiting in the capture table.", "capture_rows"),
    "headwater_slot_lag_bytes": ("WAL bytes that PostgreSQL retains for the replication slot.", "slot_lag_bytes"),
    "headwater_slot_safe_bytes": (
        "WAL bytes left before PostgreSQL invalidates the slot; absent without a limit.",
        "slot_safe_bytes",
    ),
    "headwater_slot_confirmed_seconds": (
        "Time since a WAL position was last confirmed to PostgreSQL, while the slot has a backlog.",
        "slot_confirmed_seconds",
    ),
    "headwater_log_latest_offset": ("The newest offset of the log.", "latest"),
    "headwater_log_horizon_offset": ("The first offset still retained.", "horizon"),
    "headwater_storage_full": ("1 while the disk of the data folder has no space for writes.", "storage_full"),
    "headwater_log_bytes": ("Size of the log on disk.", "log_bytes"),
}
PULL_METRICS = {  # name -> help, field of WorkerCounters
    "headwater_pulls": ("Bulk pulls being answered.", "running"),
    "headwater_pull_bytes_total": ("Bytes of Arrow sent on bulk pulls.", "bytes"),
    "headwater_pull_rows_total": ("Rows and images of changes sent on bulk pulls.", "rows"),
    "headwater_pull_cache_hits_total": ("Log slices served from the pull cache.", "hits"),
    "headwater_pull_cache_misses_total": ("Log slices not in the pull cache.", "misses"),
    "headwater_pull_cache_bytes": ("Size of the pull cache.", "cache_bytes"),
    "headwater_pull_worker_starts_total": ("Starts of the bulk worker; above 1 it has crashed.", "starts"),
}
SUBSCRIPTION_METRICS = {  # name -> help, field of stats.snapshot.cdc
    "headwater_subscriptions": ("Stored subscriptions.", "active_subscriptions"),
    "headwater_subscriptions_paused": ("Subscriptions that are paused.", "paused_subscriptions"),
    "headwater_subscriptions_pressured": (
        "Subscriptions whose lag uses at least half of the changes, bytes or age that the log retains.",
        "pressured_subscriptions",
    ),
    "headwater_subscriptions_lost": ("Subscriptions that need a new snapshot.", "resnapshot_subscriptions"),
    "headwater_subscription_lag_changes_max": ("Lag of the subscription furthest behind.", "max_lag"),
    "headwater_subscription_lag_changes_sum": ("Lag of all subscriptions together.", "total_lag"),
}
_RPC_SECONDS = "headwater_rpc_request_seconds"


def _kind(name: str) -> str:
    return "counter" if name.endswith("_total") else "histogram" if name == _RPC_SECONDS else "gauge"


METRICS: dict[str, tuple[str, str, tuple[str, ...]]] = {  # name -> kind, help, labels
    name: (_kind(name), text, labels)
    for name, (text, labels) in {
        **SERVER_METRICS,
        **{name: (text, ("db",)) for name, (text, _) in (DATABASE_METRICS | SUBSCRIPTION_METRICS).items()},
        **{name: (text, ()) for name, (text, _) in (PULL_METRICS | CHANGEFEED_METRICS).items()},
        **QUERY_METRICS,
    }.items()
}
BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics(Collector):
    """The metrics of one server, in a registry of its own. Some are read from the databases at each scrape."""

    def __init__(
        self,
        status: Status,
        feeds: Feeds | None = None,
        pulls: Pulls | None = None,
        queries: Queries | None = None,
        limits: Limits | None = None,
        *,
        methods: Container[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._status, self._feeds, self._pulls, self._queries, self._limits = status, feeds, pulls, queries, limits
        self._methods, self._clock, self._started = methods, clock, clock()
        self.changefeeds = Changefeeds()  # updated by the change feed service
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._requests = self._counter("headwater_rpc_requests_total")
        self._responses = self._counter("headwater_http_responses_total")
        self._calls = self._counter("headwater_grpc_calls_total")
        self._messages = self._counter("headwater_gateway_messages_total")
        _, text, labels = METRICS[_RPC_SECONDS]
        self._seconds = Histogram(_RPC_SECONDS, text, labels, buckets=BUCKETS, registry=self._registry)
        self._answered: dict[tuple[str, str], tuple[Counter, Histogram]] = {}
        self._sent: dict[tuple[str, int], Counter] = {}

    def answered(self, method: str, code: str, seconds: float) -> None:
        """Count an answered RPC request; names that are not methods are counted together."""
        name = method if method in self._methods else "unknown"
        pair = self._answered.get((name, code))
        if pair is None:
            pair = self._answered[name, code] = self._requests.labels(name, code), self._seconds.labels(name)
        pair[0].inc()
        pair[1].observe(seconds)

    def responded(self, route: str, status: int) -> None:
        """Count an HTTP response."""
        child = self._sent.get((route, status))
        if child is None:
            child = self._sent[route, status] = self._responses.labels(route, str(status))
        child.inc()

    def called(self, method: str, status: str) -> None:
        """Count a finished gRPC call of a known method, or of `unknown`."""
        self._calls.labels(method, status).inc()

    def gateway_answered(self, type: str, code: str) -> None:
        """Count an answered gateway message of a known type, or of `unknown`."""
        self._messages.labels(type, code).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format. May block: it reads the status of each database."""
        return generate_latest(self._registry)

    def _counter(self, name: str) -> Counter:
        _, text, labels = METRICS[name]
        return Counter(name, text, labels, registry=self._registry)

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering reads no database."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read at each scrape; unknown values are absent."""
        found = self._status()
        yield _family("headwater_info", [((__version__,), 1.0)])
        yield _family("headwater_uptime_seconds", [((), self._clock() - self._started)])
        generations = [((db, status.generation), 1.0) for db, status in found.items()]
        yield _family("headwater_log_generation_info", generations)
        slots = [((db, each.wal_status), 1.0) for db, each in found.items() if each.wal_status is not None]
        yield _family("headwater_slot_wal_status", slots)
        failed = [((db,), float(each.error is not None)) for db, each in found.items()]
        yield _family("headwater_capture_failed", failed)
        for name, (_, field) in DATABASE_METRICS.items():
            known = [((db,), value) for db, each in found.items() if (value := getattr(each, field)) is not None]
            yield _family(name, [(labels, float(value)) for labels, value in known])
        if self._limits is not None:
            yield from _limited(self._limits)
        if self._feeds is not None:
            yield from _fed(self._feeds)
        if self._pulls is not None:
            for name, (_, field) in PULL_METRICS.items():
                yield _family(name, [((), float(getattr(self._pulls.numbers, field)))])
        for name, (_, value_of) in CHANGEFEED_METRICS.items():
            yield _family(name, [((), float(value_of(self.changefeeds)))])
        if self._queries is not None:
            for name, samples in asked(self._queries):
                yield _family(name, samples)


def _limited(limits: Limits) -> Iterator[Metric]:
    tenants = limits.tenants.all()
    yield _family("headwater_requests_total", [((db,), float(one.requests)) for db, one in tenants.items()])
    yield _family("headwater_connections", [((), float(limits.connections.open))])
    yield _family("headwater_database_streams", [((db,), float(one.streams)) for db, one in tenants.items()])
    refused = [
        (("caller", ""), float(limits.refused_callers)),
        (("connections", ""), float(limits.connections.refused)),
    ]
    for db, one in tenants.items():
        refused += [(("rate", db), float(one.refused_requests)), (("streams", db), float(one.refused_streams))]
    yield _family("headwater_limited_total", refused)


def _fed(feeds: Feeds) -> Iterator[Metric]:
    streams, delivered = feeds.readers.count_streams(), feeds.readers.deliveries_by_transport()
    yield _family("headwater_streams", [((name,), float(count)) for name, count in streams.items()])
    each = feeds.readers.deliveries_by_database(feeds.databases.names())
    yield _family("headwater_database_delivered_changes_total", [((db,), float(n)) for db, n in each.items()])
    yield _family("headwater_polls", [((), float(len(feeds.readers.polls())))])
    yield _family("headwater_delivered_changes_total", [((name,), float(n)) for name, n in delivered.items()])
    found = {db: feeds.subscriptions.counters(db) for db in feeds.databases.names()}
    for name, (_, field) in SUBSCRIPTION_METRICS.items():
        yield _family(name, [((db,), float(numbers[field])) for db, numbers in found.items()])


def _family(name: str, samples: Sequence[tuple[Sequence[str], float]]) -> Metric:
    kind, text, labels = METRICS[name]
    family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    metric = family(name, text, labels=labels)
    for values, number in samples:
        metric.add_metric(values, number)
    return metric
