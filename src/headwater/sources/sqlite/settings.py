"""Settings of the SQLite source: the section [sqlite]."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.config.setting_types import FLAG, NAMES, SECONDS, integer, one_of, setting


@dataclass(frozen=True)
class SqliteConfig:
    """Settings of the SQLite source."""

    wal: bool = setting(False, FLAG, "allow turning a file into WAL mode")
    foreign_keys: bool = setting(True, FLAG, "enforce foreign keys on writes through the server")
    tables: tuple[str, ...] = setting((), NAMES, "tables to capture; none named means all")
    tx_seconds: float = setting(2.0, SECONDS, "longest an interactive transaction may hold the writer")
    tx_idle_seconds: float = setting(0.5, SECONDS, "longest it may hold the writer without a statement")
    statement_seconds: float = setting(30.0, SECONDS, "longest one statement of a caller may run")
    trim_rows: int = setting(10_000, integer(1), "moved changes that make a trim of the capture table due")
    trim_seconds: float = setting(1.0, SECONDS, "time that makes a trim of the capture table due")
    poll_seconds: float = setting(0.05, SECONDS, "look for foreign commits this often without inotify")
    on_discontinuity: str = setting(
        "new_generation", one_of("new_generation", "stop"), "what to do about a restored or swapped file"
    )
