"""Registry of source kinds by URL scheme. To add one: a folder with a `kind.py`, and a line in KINDS."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from headwater.errors import ConfigError, NotSupported
from headwater.model.change import Transaction
from headwater.sources.capture_stream import LogNotes
from headwater.sources.read import BulkAddress, BulkReader, PastShapes, ServerPositions
from headwater.sources.source import Source


class Check(NamedTuple):
    """One finding of `headwater doctor`. `state` is ok, warn or fail; `remedy` is the action for warn and fail."""

    subject: str
    state: str
    finding: str
    remedy: str = ""


class LogView(Protocol):
    """The log of a database, as `doctor` compares it with the source."""

    @property
    def generation(self) -> str:
        """Return the generation of the log: the name of one uninterrupted history."""

    @property
    def latest(self) -> int:
        """Return the newest offset in the log; 0 if it is empty."""

    def note(self, name: str) -> str:
        """Return the text stored under `name`; see LogNotes."""

    def scan(self, *, after: int) -> Iterator[Transaction]:
        """Yield the transactions after `after`; see Log."""


class Inspection(msgspec.Struct, frozen=True):
    """Findings of `doctor` about a source, which is not changed."""

    checks: list[Check]
    is_captured: bool = False
    # Returns why a log is not the history of the source, and what to check; None if it is.
    mismatch: Callable[[LogView], tuple[str, str] | None] = lambda log: None
    is_readable: bool = True  # False: the checks name the reason, and the log cannot be compared


class CommandReport(msgspec.Struct, frozen=True):
    """Result of a command: a JSON document, equivalent lines for people, and notes with a hint each."""

    document: dict[str, Any]
    lines: list[str]
    notes: list[tuple[str, str]] = []


class CapturedTable(msgspec.Struct, frozen=True):
    """A table of a database, captured or not, as `headwater source list` shows it."""

    database: str
    table: str
    captured: bool
    schema: int | None  # version of its shape
    key: list[str]
    note: str


class SourceKind(ABC):
    """One kind of database: the interface between its folder and the rest of Headwater.

    Every command imports its module: import drivers inside the methods.
    """

    settings: type  # a dataclass; its section in the settings has the name of the kind

    def address(self, url: str) -> str:
        """Return the file or connection string that `url` names."""
        return url

    def library_version(self) -> str:
        """Return the version of the database library in this process; "" if the database is a server."""
        return ""

    @abstractmethod
    def open(self, name: str, url: str, *, notes: LogNotes, settings: Any, folder: Path, is_embedded: bool) -> Source:
        """Open the database at `url`; `folder` is the data folder, which holds our own database if `is_embedded`."""

    def open_bulk_reader(
        self, name: str, address: BulkAddress, *, generation: str, log: PastShapes, server: ServerPositions
    ) -> BulkReader:
        """Open the database for reading in the bulk worker process; NotSupported if it has no bulk reads."""
        raise NotSupported(f"{name!r} cannot be read in bulk", hint="Feeds of its changes are served.")

    def list_tables(self, name: str, url: str, settings: Any) -> list[CapturedTable]:
        """Return the tables of the database, captured or not, without a server; NotSupported if it needs one."""
        raise NotSupported(f"the tables of {name!r} can be listed only while it is served")

    def inspect(self, name: str, url: str, settings: Any) -> Inspection:
        """Return the findings of `headwater doctor` about the database, without changing it."""
        return Inspection([])

    def check_attach(self, url: str) -> None:  # noqa: B027  # most kinds have nothing to check
        """Raise an error if a command cannot set up capture of the database."""

    def attached(self, name: str, url: str, status: dict[str, Any], tables: tuple[str, ...]) -> CommandReport:
        """Return the report on a capture that was set up; `tables` are the tables that the user named."""
        found = status["tables"]
        return CommandReport({"database": name, "tables": found}, [f"capturing {', '.join(found)} as {name!r}"])

    def setup_sql(self, name: str, url: str, *, reader: str, writer: str, ddl_statements: bool) -> list[str]:
        """Return the SQL that prepares the database for Headwater."""
        raise NotSupported("only PostgreSQL needs logins for callers", hint="SQLite files need no logins.")

    def detach(self, name: str, url: str, settings: Any, find_log: Callable[[str | None], str | None]) -> CommandReport:
        """Remove Headwater from the database; `find_log` returns the log path of a generation, or of this database."""
        raise NotSupported(f"Headwater leaves nothing behind in {name!r}")


class RegistryEntry(msgspec.Struct, frozen=True):
    """The URL schemes of a kind of source, and the module that implements it."""

    schemes: tuple[str, ...]
    module: str  # the module with KIND
    example: str


KINDS: dict[str, RegistryEntry] = {
    "sqlite": RegistryEntry(("sqlite:///", "sqlite:"), "headwater.sources.sqlite.kind", "a SQLite file (app.db)"),
    "postgres": RegistryEntry(("postgresql://", "postgres://"), "headwater.sources.postgres.kind", "postgresql://…"),
}
FILES = "sqlite"  # the kind of a database given as a path


def kind(name: str) -> SourceKind:
    """Return the kind of source called `name`; this imports its module, not its driver."""
    found: SourceKind = import_module(KINDS[name].module).KIND
    return found


def kind_name(url: str) -> str:
    """Return the name of the source kind that handles `url`; ConfigError if no kind does."""
    for name, registered in KINDS.items():
        if url.startswith(registered.schemes):
            return name
    if "://" in url:
        examples = " or ".join(registered.example for registered in KINDS.values())
        raise ConfigError(f"there is no source for {url.split('://')[0]}:// yet", hint=f"Give {examples}.")
    return FILES


def settings_classes() -> dict[str, type]:
    """Return the settings class of every kind, by the name of its section."""
    return {name: kind(name).settings for name in KINDS}
