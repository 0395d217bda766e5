"""The rooms' settings: one frozen dataclass each, and all of them together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from headwater.config.reader import unknown
from headwater.config.setting_types import (
    ADDRESS,
    ADDRESS_OR_OFF,
    DURATION,
    FLAG,
    NAMES,
    RATE,
    SECONDS,
    SECRET,
    TEXT,
    TOKEN,
    Secret,
    SettingType,
    integer,
    need,
    one_of,
    or_none,
    pairs,
    setting,
    text,
)
from headwater.errors import ConfigError


@dataclass(frozen=True)
class ServeConfig:
    """The server: addresses, credentials, TLS, limits of clients."""

    http: str = setting("127.0.0.1:7171", ADDRESS, "where HTTP listens", "HEADWATER_HTTP")
    grpc: str = setting("127.0.0.1:7172", ADDRESS_OR_OFF, "where gRPC listens, or off", "HEADWATER_GRPC")
    token: Secret | None = setting(
        None,
        TOKEN,
        "the admin credential; setting it locks every route; 16 characters or more where others reach the server",
        "HEADWATER_TOKEN",
        "SKEINDB_TOKEN",
    )
    auth: bool = setting(False, FLAG, "demand a credential also on loopback")
    key_pepper: Secret | None = setting(
        None,
        SECRET,
        "what API keys are hashed with, 32 bytes or more; made in the data directory if not given",
        "HEADWATER_KEY_PEPPER",
    )
    jwt_secret: Secret | None = setting(None, SECRET, "trust JWTs signed with it by HS256", "HEADWATER_JWT_SECRET")
    jwt_keys: str | None = setting(None, or_none(TEXT), "trust JWTs signed by RS256 with a key of this JWKS file")
    jwt_issuer: str | None = setting(None, or_none(TEXT), "trust only JWTs of this issuer (`iss`)")
    jwt_audience: str | None = setting(None, or_none(TEXT), "trust only JWTs for this audience (`aud`)")
    tls_cert: str | None = setting(
        None, or_none(TEXT), "PEM file with the certificate of both ports and its chain; TLS is off without"
    )
    tls_key: str | None = setting(None, or_none(TEXT), "PEM file with its key, unless it is in the same file")
    tls_ca: str | None = setting(
        None, or_none(TEXT), "PEM file with authorities: clients of gRPC must show a certificate of one of them"
    )
    tls_http_clients: bool = setting(False, FLAG, "demand such a certificate of clients of HTTP too")
    max_body_bytes: int = setting(16 << 20, integer(1024), "largest request body")
    drain_seconds: float = setting(10.0, SECONDS, "how long a stop waits for open requests")
    metrics_open: bool = setting(False, FLAG, "serve /metrics without a credential")
    cors_origins: tuple[str, ...] = setting(
        ("*",), NAMES, "web origins that may use the server with a credential; without one only loopback pages may"
    )
    ready: str = setting(
        "any", one_of("any", "all"), "databases whose capture must run for /readyz to answer 200: any of them, or all"
    )
    max_streams: int = setting(16_384, integer(1), "open streams of all clients together")
    max_streams_per_client: int = setting(4_096, integer(1), "open streams from one address")
    max_connections: int = setting(
        20_000, integer(1), "open connections of all clients together, for HTTP and for gRPC each"
    )
    max_connections_per_client: int = setting(
        5_000, integer(1), "open connections from one address, to HTTP and to gRPC each"
    )
    rate: float | None = setting(
        None, or_none(RATE), "requests per second of one caller, who is known by credential or else by address"
    )
    burst: int = setting(100, integer(1), "requests that one caller may send at once, where there is a rate")
    stall_seconds: float = setting(300.0, SECONDS, "how long a client may leave its answer unread before it is cut off")
    ticket_seconds: float = setting(60.0, SECONDS, "how long a stream ticket is good for")


@dataclass(frozen=True)
class LogConfig:
    """The durable log of each database. The strictest retention limit that is set wins."""

    retention_events: int | None = setting(
        1_000_000,
        or_none(integer(1)),
        "changes kept",
        "HEADWATER_CDC_RETENTION_EVENTS",
        "SKEINDB_CDC_RETENTION_EVENTS",
    )
    retention_bytes: int | None = setting(None, or_none(integer(1)), "bytes of changes kept")
    retention_age: float | None = setting(None, or_none(DURATION), "how long changes are kept")
    flush_ms: int = setting(50, integer(0), "longest wait for more changes before a block is written")


@dataclass(frozen=True)
class FeedsConfig:
    """Subscriptions and streams."""

    checkpoint_seconds: float = setting(5.0, SECONDS, "time between two checkpoints on a stream")
    max_subscriptions: int = setting(100_000, integer(1), "stored subscriptions")
    max_subscription_bytes: int = setting(
        8 << 20, integer(1), "bytes of the options of all stored subscriptions of one viewer or editor"
    )
    lease_seconds: float = setting(3600.0, SECONDS, "longest a snapshot holds the horizon of the log")
    lease_bytes: int = setting(10 << 30, integer(0), "most bytes the log keeps for the sake of snapshots")
    catchups: int = setting(4, integer(1), "catch-ups of change feeds at a time for one caller; others wait")
    catchup_budget: int = setting(
        10_000_000, integer(1), "changes a minute that catch-ups of change feeds read for one caller"
    )
    slow_consumer_seconds: float = setting(30.0, SECONDS, "how long the reader of a change feed may be behind")


@dataclass(frozen=True)
class PullConfig:
    """Bulk reads: the size of table ranges, and the cache of log slices."""

    target_bytes: int = setting(64 << 20, integer(1), "bytes of rows in one range of a table, about")
    cache_bytes: int = setting(1 << 30, integer(0), "most bytes of the log kept ready for bulk readers")


@dataclass(frozen=True)
class QueriesConfig:
    """Prepared queries and their answers."""

    max_prepared: int = setting(100_000, integer(1), "prepared queries that are kept")
    public: bool = setting(False, FLAG, "let shared caches keep answers of queries, to be asked about each time")
    answer_bytes: int = setting(64 << 20, integer(1 << 20), "most bytes of one answer")
    answers_bytes: int = setting(512 << 20, integer(1 << 20), "most bytes of memory for all answers being made")
    sample: int = setting(
        100, integer(0), "of so many instances one is compared with its next answer when it went stale; 0: none"
    )


@dataclass(frozen=True)
class QuotasConfig:
    """Limits on the requests, streams and subscriptions of each database."""

    rate: float | None = setting(None, or_none(RATE), "requests per second for one database")
    burst: int = setting(100, integer(1), "requests for one database at once, where there is a rate")
    max_streams: int | None = setting(None, or_none(integer(1)), "open streams and waiting polls of one database")
    max_subscriptions: int | None = setting(None, or_none(integer(1)), "stored subscriptions of one database")


@dataclass(frozen=True)
class DatabaseConfig:
    """One database to serve: its name on the wire and where it is."""

    name: str
    url: str
    retention: tuple[tuple[str, Any], ...] = ()  # limits that differ from those of [log]
    quotas: tuple[tuple[str, Any], ...] = ()  # limits that differ from those of [quotas]


def _databases(value: Any) -> tuple[DatabaseConfig, ...]:
    need(isinstance(value, Mapping))
    for name in value:
        # The name is part of file names and URLs; `default` is an alias of `main`.
        need(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,62}", name, re.ASCII) and name != "default")
    return tuple(_database(name, found) for name, found in value.items())


def _database(name: str, found: Any) -> DatabaseConfig:
    """Return the database of `name = "file"` or of a table with `url` and limits; without `url` it is embedded."""
    if not isinstance(found, Mapping):
        return DatabaseConfig(name, _url(name, found))
    limits = {each.name: each.metadata["kind"] for each in fields(LogConfig) if each.name.startswith("retention_")}
    quotas = {each.name: each.metadata["kind"] for each in fields(QuotasConfig)}
    known = limits | quotas
    own = {key: value for key, value in found.items() if key != "url"}
    for key, value in own.items():
        if key not in known:
            raise unknown(f"setting of database {name}", key, ["url", *known])
        own[key] = known[key].check(value)
    url = _url(name, found["url"]) if "url" in found else ""
    mine = [tuple((key, value) for key, value in own.items() if key in group) for group in (limits, quotas)]
    return DatabaseConfig(name, url, *mine)


def _url(name: str, found: Any) -> str:
    """Return the URL; ConfigError for a PostgreSQL address that would count as a file name, which errors show."""
    url = text(found)
    if re.match(r"postgres(ql)?:(?!//)|(?!\w+://)(.*\s)?password\s*=", url, re.IGNORECASE | re.DOTALL):
        hint = "Write postgresql://USER@HOST:PORT/DATABASE."
        raise ConfigError(f"the address of database {name} does not begin with postgresql://", hint=hint)
    return url


DATABASES = SettingType(
    "a table of name = path (or a table with url, retention_* and quotas), names of letters, digits, _ and -",
    _databases,
    pairs,
)


@dataclass(frozen=True)
class Config:
    """All settings, by section."""

    data: str = setting("./headwater-data", TEXT, "directory of our own files", "HEADWATER_DATA")
    databases: tuple[DatabaseConfig, ...] = setting(
        (), DATABASES, "databases by name; none means `main` in the data directory", "HEADWATER_DATABASES"
    )
    ca: str | None = setting(
        None, or_none(TEXT), "PEM file with authorities that our clients trust besides the system's", "HEADWATER_CA"
    )
    serve: ServeConfig = ServeConfig()
    log: LogConfig = LogConfig()
    feeds: FeedsConfig = FeedsConfig()
    pull: PullConfig = PullConfig()
    queries: QueriesConfig = QueriesConfig()
    quotas: QuotasConfig = QuotasConfig()
    sources: Mapping[str, Any] = field(default_factory=dict)  # settings of each kind of source, by its name

    def section(self, name: str) -> Any:
        """Return the settings of a room or of a kind of source; "" is all of them."""
        if not name:
            return self
        return self.sources[name] if name in self.sources else getattr(self, name)

    def log_of(self, database: DatabaseConfig) -> LogConfig:
        """Return the log settings of one database."""
        return replace(self.log, **dict(database.retention))

    def named(self, name: str) -> DatabaseConfig:
        """Return the configured database `name`, or an embedded one if it is not configured."""
        return next((found for found in self.databases if found.name == name), DatabaseConfig(name, ""))

    def quotas_of(self, name: str) -> QuotasConfig:
        """Return the quotas of the database `name`, its own before those of all databases."""
        return replace(self.quotas, **dict(self.named(name).quotas))


ROOMS = {each.name: type(each.default) for each in fields(Config) if is_dataclass(each.default)}
