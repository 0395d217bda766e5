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
from headwater.ranges.worker.process import WorkerCounters
from headwater.serve.http.handlers.pulls import Pulls
from headwater.serve.limits.limits import Limits
from headwater.serve.metrics.changefeed_metrics import CHANGEFED, CHANGEFEED_METRICS
from headwater.serve.metrics.changefeed_metrics import ChangefeedCounters as Changefeeds
from headwater.serve.metrics.query_metrics import QUERY_METRICS, asked

Status = Callable[[], dict[str, DatabaseStatus]]

METRICS: dict[str, tuple[str, str, tuple[str, ...]]] = {  # name -> kind, help, labels
    "headwater_info": ("gauge", "Always 1; the version as a label.", ("version",)),
    "headwater_uptime_seconds": ("gauge", "Time since the server started.", ()),
    "headwater_ready": ("gauge", "1 once the database has its first capture position.", ("db",)),
    "headwater_rpc_requests_total": ("counter", "RPC requests answered.", ("method", "code")),
    "headwater_rpc_request_seconds": ("histogram", "Time to answer an RPC request.", ("method",)),
    "headwater_http_responses_total": ("counter", "HTTP responses sent.", ("route", "status")),
    "headwater_grpc_calls_total": ("counter", "gRPC calls that ended.", ("method", "status")),
    "headwater_requests_total": ("counter", "Accepted requests for a database.", ("db",)),
    "headwater_limited_total": (
        "counter",
        "Requests refused by a limit: of the caller, of connections, or of the database by rate or streams.",
        ("limit", "db"),
    ),
    "headwater_connections": ("gauge", "Open connections to HTTP, WebSockets included.", ()),
    "headwater_gateway_messages_total": ("counter", "Messages answered by the JSON gateway.", ("type", "code")),
    "headwater_writes_total": ("counter", "Transactions committed through the server.", ("db",)),
    "headwater_capture_lag_changes": ("gauge", "Changes committed and not yet in the log.", ("db",)),
    "headwater_capture_lag_seconds": ("gauge", "Age of the oldest change not yet in the log.", ("db",)),
    "headwater_capture_failed": ("gauge", "1 while capture is stopped by an error.", ("db",)),
    "headwater_capture_table_rows": ("gauge", "Rows waiting in the capture table.", ("db",)),
    "headwater_slot_lag_bytes": ("gauge", "WAL bytes that PostgreSQL retains for the replication slot.", ("db",)),
    "headwater_slot_safe_bytes": (
        "gauge",
        "WAL bytes left before PostgreSQL invalidates the slot; absent without a limit.",
        ("db",),
    ),
    "headwater_slot_confirmed_seconds": (
        "gauge",
        "Time since a WAL position was last confirmed to PostgreSQL, while the slot has a backlog.",
        ("db",),
    ),
    "headwater_slot_wal_status": ("gauge", "Always 1; the state of the slot as a label.", ("db", "wal_status")),
    "headwater_log_latest_offset": ("gauge", "The newest offset of the log.", ("db",)),
    "headwater_log_horizon_offset": ("gauge", "The first offset still retained.", ("db",)),
    "headwater_storage_full": ("gauge", "1 while the disk of the data folder has no space for writes.", ("db",)),
    "headwater_log_bytes": ("gauge", "Size of the log on disk.", ("db",)),
    "headwater_log_generation_info": ("gauge", "Always 1; the generation as a label.", ("db", "generation")),
    "headwater_streams": ("gauge", "Open streams.", ("transport",)),
    "headwater_polls": ("gauge", "Polls being answered or waiting.", ()),
    "headwater_delivered_changes_total": ("counter", "Changes and snapshot rows sent on streams.", ("transport",)),
    "headwater_database_streams": ("gauge", "Open streams, bulk reads and waiting polls of a database.", ("db",)),
    "headwater_database_delivered_changes_total": (
        "counter",
        "Changes and snapshot rows sent on streams of a database.",
        ("db",),
    ),
    "headwater_pulls": ("gauge", "Bulk pulls being answered.", ()),
    "headwater_pull_bytes_total": ("counter", "Bytes of Arrow sent on bulk pulls.", ()),
    "headwater_pull_rows_total": ("counter", "Rows and images of changes sent on bulk pulls.", ()),
    "headwater_pull_cache_hits_total": ("counter", "Log slices served from the pull cache.", ()),
    "headwater_pull_cache_misses_total": ("counter", "Log slices not in the pull cache.", ()),
    "headwater_pull_cache_bytes": ("gauge", "Size of the pull cache.", ()),
    "headwater_pull_worker_starts_total": ("counter", "Starts of the bulk worker; above 1 it has crashed.", ()),
    "headwater_subscriptions": ("gauge", "Stored subscriptions.", ("db",)),
    "headwater_subscriptions_paused": ("gauge", "Subscriptions that are paused.", ("db",)),
    "headwater_subscriptions_pressured": (
        "gauge",
        "Subscriptions that lag by more than half of the retained log.",
        ("db",),
    ),
    "headwater_subscriptions_lost": ("gauge", "Subscriptions that need a new snapshot.", ("db",)),
    "headwater_subscription_lag_changes_max": ("gauge", "Lag of the subscription furthest behind.", ("db",)),
    "headwater_subscription_lag_changes_sum": ("gauge", "Lag of all subscriptions together.", ("db",)),
    **CHANGEFEED_METRICS,
    **QUERY_METRICS,
}
BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_PULLED: dict[str, Callable[[DatabaseStatus], float | None]] = {
    "headwater_ready": lambda status: float(status.ready),
    "headwater_writes_total": lambda status: status.writes,
    "headwater_capture_lag_changes": lambda status: status.lag_changes,
    "headwater_capture_lag_seconds": lambda status: status.lag_seconds,
    "headwater_capture_failed": lambda status: float(status.error is not None),
    "headwater_capture_table_rows": lambda status: status.capture_rows,
    "headwater_slot_lag_bytes": lambda status: status.slot_lag_bytes,
    "headwater_slot_safe_bytes": lambda status: status.slot_safe_bytes,
    "headwater_slot_confirmed_seconds": lambda status: status.slot_confirmed_seconds,
    "headwater_storage_full": lambda status: float(status.storage_full),
    "headwater_log_latest_offset": lambda status: status.latest,
    "headwater_log_horizon_offset": lambda status: status.horizon,
    "headwater_log_bytes": lambda status: status.log_bytes,
}


_COUNTED = {  # name -> field of stats.snapshot.cdc
    "headwater_subscriptions": "active_subscriptions",
    "headwater_subscriptions_paused": "paused_subscriptions",
    "headwater_subscriptions_pressured": "pressured_subscriptions",
    "headwater_subscriptions_lost": "resnapshot_subscriptions",
    "headwater_subscription_lag_changes_max": "max_lag",
    "headwater_subscription_lag_changes_sum": "total_lag",
}


_WORKED: dict[str, Callable[[WorkerCounters], float]] = {
    "headwater_pulls": lambda numbers: numbers.running,
    "headwater_pull_bytes_total": lambda numbers: numbers.bytes,
    "headwater_pull_rows_total": lambda numbers: numbers.rows,
    "headwater_pull_cache_hits_total": lambda numbers: numbers.hits,
    "headwater_pull_cache_misses_total": lambda numbers: numbers.misses,
    "headwater_pull_cache_bytes": lambda numbers: numbers.cache_bytes,
    "headwater_pull_worker_starts_total": lambda numbers: numbers.starts,
}


class Metrics:
    """The metrics of one server, in a registry of its own."""

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
        self._registry, self._methods = CollectorRegistry(), methods
        self.changefeeds = Changefeeds()  # updated by the change feed service
        self._registry.register(_DatabaseCollector(status, feeds, pulls, queries, limits, self.changefeeds, clock))
        self._requests = self._counter("headwater_rpc_requests_total")
        self._responses = self._counter("headwater_http_responses_total")
        self._calls = self._counter("headwater_grpc_calls_total")
        self._messages = self._counter("headwater_gateway_messages_total")
        name = "headwater_rpc_request_seconds"
        _, text, labels = METRICS[name]
        self._seconds = Histogram(name, text, labels, buckets=BUCKETS, registry=self._registry)
        self._answered: dict[tuple[str, str], tuple[Counter, Histogram]] = {}
        self._sent: dict[tuple[str, int], Counter] = {}

    def answered(self, method: str, code: str, seconds: float) -> None:
        """Count an answered RPC request; names that are not methods are counted together."""
        pair = self._answered.get((method, code))
        if pair is None:
            pair = self._children(method, code)
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

    def _children(self, method: str, code: str) -> tuple[Counter, Histogram]:
        name = method if method in self._methods else "unknown"
        pair = self._answered.get((name, code))
        if pair is None:
            pair = self._requests.labels(name, code), self._seconds.labels(name)
            self._answered[name, code] = pair
        return pair


class _DatabaseCollector(Collector):
    """Metrics that are read from the databases at each scrape; unknown values are absent."""

    def __init__(
        self,
        status: Status,
        feeds: Feeds | None,
        pulls: Pulls | None,
        queries: Queries | None,
        limits: Limits | None,
        changefeeds: Changefeeds,
        clock: Callable[[], float],
    ) -> None:
        self._status = status
        self._queries, self._limits = queries, limits
        self._changefeeds = changefeeds
        self._pulls = pulls
        self._feeds = feeds
        self._clock = clock
        self._started = clock()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        found = self._status()
        yield _family("headwater_info", [((__version__,), 1.0)])
        yield _family("headwater_uptime_seconds", [((), self._clock() - self._started)])
        generations = [((db, status.generation), 1.0) for db, status in found.items()]
        yield _family("headwater_log_generation_info", generations)
        slots = [((db, each.wal_status), 1.0) for db, each in found.items() if each.wal_status is not None]
        yield _family("headwater_slot_wal_status", slots)
        for name, read in _PULLED.items():
            known = [((db,), value) for db, each in found.items() if (value := read(each)) is not None]
            yield _family(name, [(labels, float(value)) for labels, value in known])
        if self._limits is not None:
            yield from _limited(self._limits)
        if self._feeds is not None:
            yield from _fed(self._feeds)
        if self._pulls is not None:
            for name, of in _WORKED.items():
                yield _family(name, [((), float(of(self._pulls.numbers)))])
        for name, value_of in CHANGEFED.items():
            yield _family(name, [((), float(value_of(self._changefeeds)))])
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
    yield _family("headwater_polls", [((), float(feeds.readers.count_polls()))])
    yield _family("headwater_delivered_changes_total", [((name,), float(n)) for name, n in delivered.items()])
    found = {db: feeds.subscriptions.counters(db) for db in feeds.databases.names()}
    for name, field in _COUNTED.items():
        yield _family(name, [((db,), float(numbers[field])) for db, numbers in found.items()])


def _family(name: str, samples: Sequence[tuple[Sequence[str], float]]) -> Metric:
    kind, text, labels = METRICS[name]
    family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    metric = family(name, text, labels=labels)
    for values, number in samples:
        metric.add_metric(values, number)
    return metric
