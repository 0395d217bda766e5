"""The application: opens the databases with their logs and capture threads, and connects the parts of the server."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from pathlib import Path
from typing import Any

import msgspec

from headwater.capture.capture import Capture
from headwater.config import Config, DatabaseConfig, QuotasConfig
from headwater.database import DatabaseStatus, ManagedDatabases
from headwater.errors import (
    ConfigError,
    HeadwaterError,
    NotFound,
    NotSupported,
    OffsetExpired,
    StorageFull,
    Unavailable,
)
from headwater.feeds.feeds import Feeds
from headwater.feeds.subscriptions.registry import Registry
from headwater.log.disk.disk_log import DiskLog
from headwater.log.disk.space_reserve import SpaceReserve
from headwater.log.live.live_log import LiveLog
from headwater.log.log import Retention
from headwater.model.database_name import is_reserved
from headwater.model.work.answer_limits import MEMORY
from headwater.queries.head_checks import Run
from headwater.queries.prepared import PreparedQueries
from headwater.queries.queries import Queries
from headwater.ranges.pull.jobs import DatabaseLocation
from headwater.ranges.ranges.lease import restore_leases
from headwater.ranges.ranges.ranges import Ranges
from headwater.ranges.ranges.store import Store
from headwater.ranges.worker.position_requests import PositionServer
from headwater.ranges.worker.process import BulkDatabases, WorkerProcess
from headwater.settings import all_settings
from headwater.sources import registry
from headwater.sources.capture_stream import LogNotes
from headwater.sources.file_lock import FileLock
from headwater.sources.read import SourceHead
from headwater.sources.source import Source

logger = logging.getLogger(__name__)
RECOVER_SECONDS = 1.0  # between two checks whether a full disk has space again
CLOSE_SECONDS = 2.0  # longest wait of a close for a log that cannot be written; the source keeps the missing changes


# The fields of DatabaseStatus that the status of a source has by the same name.
SOURCE_FIELDS = ["capture_rows", "writes", "wal_status", "slot_lag_bytes", "slot_safe_bytes", "slot_confirmed_seconds"]


class Database(msgspec.Struct, frozen=True):
    """A `headwater.database.Database`: the source, the log, and the capture thread between them."""

    source: Source
    log: LiveLog
    disk: DiskLog
    capture: Capture
    retention: Retention
    embedded: bool

    def catch_up(self, timeout: float) -> bool:
        return self.capture.catch_up(timeout)

    def wait_for_head(self, timeout: float) -> tuple[SourceHead, bool]:
        return self.capture.wait_for_head(timeout)

    def peek_head(self) -> SourceHead | None:
        return self.capture.peek_head()

    def reach(self, offset: int, timeout: float) -> bool:
        return self.capture.reach(offset, timeout)

    def close(self) -> None:
        """Catch up, then close writer, capture, source and log in this order, so that no change is lost."""
        with contextlib.suppress(HeadwaterError):
            # Capture needs the writer to process a schema change, so it catches up before the writer stops.
            self.capture.catch_up(CLOSE_SECONDS)
        self.source.finish_writes()
        self.capture.stop()
        self.source.close()
        self.log.close()


class App(ManagedDatabases, BulkDatabases):
    """The databases of one server."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._data = Path(config.data)
        # Guards _open and _unopened.
        self._lock = threading.Lock()
        self._open: dict[str, Database] = {}
        self._unopened: dict[str, HeadwaterError] = {}  # configured databases that a full disk kept from opening
        self._reserve = SpaceReserve(self._data)
        self._recovering: threading.Thread | None = None
        self._closing = threading.Event()
        self._files = contextlib.ExitStack()  # the lock of the data folder, and the files in it that are not databases
        self._registry: Registry | None = None
        self._store: Store | None = None
        self._prepared: PreparedQueries | None = None
        self.ranges: Ranges | None = None  # None until started
        self._building = threading.Lock()  # one database is created or dropped at a time; acquired before _lock

    def start(self) -> None:
        """Open the configured databases and those found in the data folder; retry those that a full disk prevents."""
        queries = self._config.queries
        MEMORY.configure(max_bytes=queries.answer_bytes, max_memory=queries.answers_bytes)
        make_private(self._data)
        folder = FileLock(
            str(self._data / "data"),
            what=f"the data folder {self._data}",
            hint="Stop that one first, or choose another folder with --data.",
        )
        self._files.callback(folder.release)
        try:
            self._reserve.release()
            self._registry = Registry.open(
                self._data / "subscriptions.db",
                most=self._config.feeds.max_subscriptions,
                most_bytes=self._config.feeds.max_subscription_bytes,
                quota=lambda name: self._config.quotas_of(name).max_subscriptions,
            )
            self._files.callback(self._registry.close)
            self._store = Store.open(self._data / "ranges.db")
            self._files.callback(self._store.close)
            self._prepared = PreparedQueries.open(self._data / "queries.db", most=self._config.queries.max_prepared)
            self._files.callback(self._prepared.close)
            self.ranges = Ranges(self, self._store, self._config.pull, self._config.feeds)
            self._open_all()
        except BaseException:
            self.close()
            self._reserve.take()  # for the next start
            raise

    def _open_all(self) -> None:
        """Open the databases while the space reserve is released; take it again before capture writes to the logs."""
        configured = self._configured()
        for database in configured.values():
            try:
                self._add(database, begin=False)
            except StorageFull as error:
                logger.error("%r is not open: %s; free some space", database.name, error.message)
                self._unopened[database.name] = error
        self._hide_files()
        is_whole = self._reserve.take()
        for opened in self._open.values():
            opened.capture.begin()
        if self.is_storage_full:
            logger.error("the disk of the data folder is full: it is served read-only until there is space again")
        if self._unopened or self.is_storage_full or not is_whole:
            recover = functools.partial(self._recover, configured)
            self._recovering = threading.Thread(target=recover, name="headwater-recover", daemon=True)
            self._recovering.start()

    def _recover(self, configured: dict[str, DatabaseConfig]) -> None:
        """Retry every second, until the app closes, to open the unopened databases and to take the space reserve."""
        was_full = self.is_storage_full or bool(self._unopened)
        while not self._closing.wait(RECOVER_SECONDS):
            for name in list(self._unopened):
                if not self._closing.is_set():
                    self._try_again(configured[name])
            if self._reserve.take() and not self._unopened:
                if was_full:
                    logger.info("the disk has space again: all databases are open, writes are taken")
                return

    def _try_again(self, config: DatabaseConfig) -> None:
        try:
            with self._building:
                self._add(config)
                self._hide_files()
        except Exception as error:  # any failure is retried
            known = error if isinstance(error, HeadwaterError) else Unavailable(f"{type(error).__name__}: {error}")
            if known.code != self._unopened[config.name].code:
                logger.error("%r is not open: %s", config.name, known.message)
            with self._lock:
                self._unopened[config.name] = known

    def _configured(self) -> dict[str, DatabaseConfig]:
        configured = {database.name: database for database in self._config.databases}
        if not configured:
            configured["main"] = DatabaseConfig("main", "")
        for path in sorted(self._data.glob("*.log.db")):
            name = path.name.removesuffix(".log.db")
            if not is_reserved(name) and (self._data / f"{name}.db").exists():
                configured.setdefault(name, DatabaseConfig(name, ""))
        return configured

    def _hide_files(self) -> None:
        """Set mode 0600 on the databases and logs in the data folder, but not on files that the settings name."""
        named = {Path(database.url).name for database in self._config.databases if database.url}
        for path in self._data.glob("*.db*"):
            if path.stat().st_mode & 0o077 and path.name.removesuffix("-wal").removesuffix("-shm") not in named:
                path.chmod(0o600)

    def close(self) -> None:
        """Close every database, and the app's own files in the data folder."""
        self._closing.set()
        if self._recovering is not None:
            self._recovering.join()
        with self._lock:
            self._unopened = {}
            databases, self._open = list(self._open.values()), {}
        for database in databases:
            database.close()
        self._registry = self._store = self._prepared = self.ranges = None
        self._files.close()

    def stop_statements(self) -> None:
        with self._lock:
            databases = list(self._open.values())
        for database in databases:
            database.source.stop_statements()

    def database(self, name: str) -> Database:
        with self._lock:
            found, error = self._open.get(name), self._unopened.get(name)
        if error is not None:
            raise _not_open(name, error)
        if found is None:
            # Only callers that know the principal may list the databases.
            raise NotFound(f"there is no database {name[:200]!r}", hint="See schema.list_databases.", database=name)
        return found

    def open_feeds(self) -> Feeds:
        """Create the change feeds of all databases, for use in the running event loop."""
        assert self._registry is not None
        return Feeds(self, self._registry, self._config.feeds, max_streams=self._config.serve.max_streams)

    def open_queries(self, run: Run) -> Queries:
        """Create the queries of all databases, for use in this event loop; `run` runs blocking calls in a thread."""
        assert self._prepared is not None
        settings = self._config.queries
        return Queries(self, self._prepared, run, sample=settings.sample, public=settings.public)

    def open_worker(self) -> WorkerProcess:
        return WorkerProcess(
            str(self._data / "pull-cache"),
            self._config.pull.cache_bytes,
            PositionServer(self.database),
            secrets=[name for setting in all_settings() if setting.secret for name in setting.environment],
        )

    def place(self, name: str) -> DatabaseLocation:
        found = self.database(name)
        log = os.path.abspath(found.disk.path)
        return DatabaseLocation(name, found.source.bulk_address(), log, found.disk.inode(), found.log.generation)

    def quota(self, name: str) -> QuotasConfig | None:
        return self._config.quotas_of(name) if name in self._open else None

    # --- Databases -------------------------------------------------------------------------------------------

    def get(self, name: str) -> Source:
        return self.database(name).source

    def names(self) -> list[str]:
        return sorted(self._open)

    def create(self, name: str) -> bool:
        with self._building:
            if name in self._open:
                return False
            if name in self._unopened:
                raise _not_open(name, self._unopened[name])
            self._add(self._config.named(name))
            self._hide_files()
            return True

    def drop(self, name: str) -> bool:
        with self._building:
            found = self._open.get(name)
            if found is None and name in self._unopened:
                raise _not_open(name, self._unopened[name])
            if found is None:
                return False
            if not found.embedded or name == "main":
                raise NotSupported(
                    f"the database {name!r} cannot be dropped", hint="Only those made by schema.create_database can."
                )
            with self._lock:
                del self._open[name]
            found.close()
            for path in (self._embedded_path(name), str(self._log_path(name))):
                for suffix in ("", "-wal", "-shm", "-headwater"):
                    Path(path + suffix).unlink(missing_ok=True)
            if self._store is not None:
                self._store.drop_database(name)
            return True

    def status(self) -> dict[str, DatabaseStatus]:
        with self._lock:
            opened, unopened = sorted(self._open.items()), sorted(self._unopened.items())
        found = {name: self._status(database) for name, database in opened}
        return found | {name: _status_of_unopened(error) for name, error in unopened}

    @property
    def is_storage_full(self) -> bool:
        """Return whether the disk of the data folder has no space for writes."""
        return self._reserve.is_storage_full

    def _status(self, database: Database) -> DatabaseStatus:
        log, capture = database.log, database.capture
        error = capture.error
        found: dict[str, Any] = {}
        try:
            found = database.source.status()
            error = error or found.get("error")
        except HeadwaterError as failure:
            error = error or f"{failure.code}: {failure.message}"
        head: int | None = found.get("head")
        return DatabaseStatus(
            ready=capture.ready.is_set(),
            generation=log.generation,
            horizon=log.horizon,
            latest=log.latest,
            log_bytes=database.disk.bytes,
            retention_changes=database.retention.changes,
            lag_changes=None if head is None else max(head - log.latest, 0),
            lag_seconds=capture.lag_seconds(),
            error=error,
            storage_full=self.is_storage_full,
            **{name: found.get(name) for name in SOURCE_FIELDS},
        )

    # --- building --------------------------------------------------------------------------------------------

    def _add(self, config: DatabaseConfig, *, begin: bool = True) -> None:
        """Open a database; start its capture only if `begin`."""
        database = self._build(config)
        try:
            if begin:
                database.capture.begin()
        except BaseException:
            database.close()
            raise
        with self._lock:
            self._open[config.name] = database
            self._unopened.pop(config.name, None)

    def _log_path(self, name: str) -> Path:
        return self._data / f"{name}.log.db"

    def _build(self, config: DatabaseConfig) -> Database:
        settings = self._config.log_of(config)
        age_ms = None if settings.retention_age is None else int(settings.retention_age * 1000)
        retention = Retention(changes=settings.retention_events, bytes=settings.retention_bytes, age_ms=age_ms)
        with contextlib.ExitStack() as undo:
            disk = DiskLog.open(self._log_path(config.name))
            undo.callback(disk.close)
            log = LiveLog(disk, retention_changes=retention.changes)
            source, stop_when_lost = self._source(config, log)
            undo.callback(source.close)
            self._hold(config.name, log)
            capture = Capture(
                source,
                log,
                retention=retention,
                flush_seconds=settings.flush_ms / 1000,
                stop_when_lost=stop_when_lost,
            )
            capture.prove()
            undo.pop_all()
        return Database(source, log, disk, capture, retention, embedded=not config.url)

    def _source(self, config: DatabaseConfig, notes: LogNotes) -> tuple[Source, bool]:
        """Open the source; return it, and whether capture must stop if the log is not of this database any more."""
        try:
            name = registry.kind_name(config.url)
        except ConfigError as error:
            raise ConfigError(f"{config.name!r}: {error.message}", hint=error.hint) from None
        kind = registry.kind(name)
        settings = self._config.sources.get(name) or kind.settings()
        url = config.url or self._embedded_path(config.name)
        opened = kind.open(
            config.name, url, notes=notes, settings=settings, folder=self._data, is_embedded=not config.url
        )
        return opened, settings.on_discontinuity == "stop"

    def _hold(self, name: str, log: LiveLog) -> None:
        """Restore the log leases of unfinished snapshots, before anything is trimmed."""
        settings = self._config.feeds
        for held in [] if self._registry is None else self._registry.for_db(name):
            state = held.snapshot
            if state is not None and state.generation == log.generation:
                until = state.lease_started_ms + int(settings.lease_seconds * 1000)
                with contextlib.suppress(OffsetExpired):
                    log.hold(held.id, state.held, until_ms=until, max_bytes=settings.lease_bytes, again=True)
        if self._store is not None:
            restore_leases(self._store, name, log, max_bytes=settings.lease_bytes)

    def _embedded_path(self, name: str) -> str:
        if is_reserved(name):
            raise ConfigError(
                f"an embedded database cannot be named {name!r}: {name}.db is a file of Headwater's own",
                hint="Choose another name, or give its file by url.",
            )
        return str(self._data / f"{name}.db")


def make_private(folder: Path) -> None:
    """Create the data folder with mode 0700, or restrict an existing one to it; only warn if it is not Headwater's."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    elif folder.stat().st_mode & 0o077:
        if (folder / "subscriptions.db").exists():
            folder.chmod(0o700)
        else:  # a folder that Headwater did not create, which other users may need
            logger.warning("other users can read the data folder %s; run: chmod 700 %s", folder, folder)


def _not_open(name: str, error: HeadwaterError) -> HeadwaterError:
    """Return the error that callers receive for an unopened database: without its message, which may contain paths."""
    kind = StorageFull if isinstance(error, StorageFull) else Unavailable
    return kind(f"the database {name!r} is not open yet: {error.code}")


def _status_of_unopened(error: HeadwaterError) -> DatabaseStatus:
    said, is_full = f"{error.code}: the database is not open yet", isinstance(error, StorageFull)
    return DatabaseStatus(ready=False, generation="", horizon=0, latest=0, error=said, storage_full=is_full)
