"""The server and the settings of a session: neither depends on the environment."""

from __future__ import annotations

import atexit
import itertools
import os
import pwd
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.cli_process import run
from tests.sources.postgres.pg_server import PATIENCE, Server
from tests.sources.postgres.pg_source import PgRig

from headwater.errors import SourceError
from headwater.sources.postgres.connection import Server as Address
from headwater.sources.postgres.protocol_session import Link, Pool
from headwater.sources.postgres.query.analysis.schema_epoch import state_in
from headwater.sources.postgres.snapshot_visibility import snapshot_of

_numbers = itertools.count(1)
TIMES = "CREATE TABLE t(k int PRIMARY KEY, at timestamptz, day date, pay money, v text)"
ROW = "INSERT INTO t VALUES (1, '2024-05-06 07:08:09+00', '2024-05-06', '1.50', U&'\\00e9')"


class AskedFor(PgRig):
    """A rig whose URL has further parameters."""

    asks = ""

    @property
    def url(self) -> str:
        return super().url + self.asks


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PGTZ", "Europe/Berlin"),
        ("PGDATESTYLE", "German, DMY"),
        ("PGCLIENTENCODING", "LATIN1"),
        ("PGOPTIONS", "-c IntervalStyle=iso_8601"),
        ("", "&client_encoding=LATIN1"),
        ("", "&options=-c%20TimeZone%3DEurope/Berlin"),
    ],
)
def test_stream_and_reads_return_equal_values_under_any_client_settings(
    pg: Server, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name:
        monkeypatch.setenv(name, value)
    else:
        monkeypatch.setattr(AskedFor, "asks", value)
    own = AskedFor(pg, f"address_{os.getpid()}_{next(_numbers)}", TIMES)
    try:
        own.run(ROW)
        (told,) = [change.after for part in own.pull() for change in part.changes]
        assert [told] == list(own.source.chunk("t", after=None, span=None, limit=9).rows)
        assert told is not None and told[1].iso == "2024-05-06T07:08:09+00:00" and told[4] == "é"  # type: ignore[union-attr]
        with Address("x", own.url).connect() as side:
            assert side.execute("SHOW TimeZone").fetchone() == ("UTC",)
            assert side.execute("SHOW DateStyle").fetchone() == ("ISO, YMD",)
    finally:
        own.close()


class Standby(Server):
    """A standby of `primary`, made from its files while it is stopped."""

    def __init__(self, primary: Server) -> None:
        self.programs, self._as_other = primary.programs, primary._as_other
        self.folder = Path(tempfile.mkdtemp(prefix="headwater-pg-"))
        data = self.folder / "data"
        shutil.copytree(primary.folder / "data", data, symlinks=True)
        (data / "standby.signal").touch()
        if self._as_other:
            owner = pwd.getpwnam(self._as_other["user"]).pw_uid
            for path in (self.folder, *self.folder.rglob("*")):
                os.chown(path, owner, -1)
        source = f"--primary_conninfo=host={primary.folder} user=postgres"
        self._command = [self.programs / "postgres", "-D", data, "-k", self.folder, *primary._command[5:], source]
        atexit.register(self.stop)


@pytest.fixture(scope="module")
def pair(pg: Server) -> Iterator[tuple[Server, Standby]]:
    """Yield a primary and a standby that follows it."""
    primary = Server(pg.programs)
    primary.kill(signal.SIGINT)
    standby = Standby(primary)
    primary.start()
    standby.start()
    yield primary, standby
    standby.stop()
    primary.stop()


def followed(primary: Server, standby: Server) -> None:
    """Wait until the standby has all of the primary's WAL."""
    with primary.connect() as left, standby.connect() as right:
        end = time.monotonic() + PATIENCE
        at = left.execute("SELECT pg_current_wal_lsn()::text").fetchone()
        while right.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", at).fetchone() != (True,):
            assert time.monotonic() < end
            time.sleep(0.02)


class TwoHosts(PgRig):
    """A rig whose URL has two hosts, the first a standby."""

    standby: Server

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/{self.name}?host={self.standby.folder},{self.server.folder}"

    def open(self, *, expect: str = "") -> str:
        followed(self.server, self.standby)  # where there is no such database, libpq asks nobody else
        return super().open(expect=expect)


def test_of_several_hosts_the_primary_is_used(pair: tuple[Server, Standby], monkeypatch: pytest.MonkeyPatch) -> None:
    primary, TwoHosts.standby = pair
    own = TwoHosts(primary, "hosts", "CREATE TABLE t(k int PRIMARY KEY, v text)")
    try:
        own.run("INSERT INTO t VALUES (1, 'a')")
        own.pull()
        followed(*pair)
        chunk = own.source.chunk("t", after=None, span=None, limit=9)
        assert (chunk.offset, list(chunk.rows)) == (1, [(1, "a")])
    finally:
        own.close()
    for given, attrs in (("", "primary"), ("&target_session_attrs=any", "any")):
        assert f"target_session_attrs={attrs}" in Address("x", f"postgresql://u@/d?host=a,b{given}")._text({})
    assert "target_session_attrs" not in Address("x", "postgresql://u@/d?host=a")._text({})
    monkeypatch.setenv("PGTARGETSESSIONATTRS", "any")
    assert "target_session_attrs" not in Address("x", "postgresql://u@/d?host=a,b")._text({})


def test_read_from_a_standby_is_refused(pair: tuple[Server, Standby], monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot on a standby lists no open transaction of the primary, so it has no offset."""
    followed(*pair)
    address = Address("x", f"postgresql://postgres@/postgres?host={pair[1].folder}")
    pool = Pool(address.connect)
    with pytest.raises(SourceError, match="standby"):
        pool.read(snapshot_of)
    made: list[Link] = []
    with monkeypatch.context() as before:  # as a link that a proxy leads elsewhere now
        before.setattr(Link, "refuse_standby", lambda *_: None)
        pool.read(made.append)
    for ask in (snapshot_of, state_in):
        with pytest.raises(SourceError, match="standby"):
            pool.read(ask)
        assert not made[0].is_alive, "it is not used again"
    pool.close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:p@S3cretPw@host/x",
        "postgresql:/u:S3cretPw@host/x",
        "postgres:u:S3cretPw@host/x",
        "POSTGRESQL:S3cretPw",
    ],
)
@pytest.mark.parametrize("command", ["serve", "doctor", "source list"])
def test_mistyped_address_is_refused_without_its_password(tmp_path: Path, url: str, command: str) -> None:
    found = run(*command.split(), f"shop={url}", "--data", str(tmp_path / "data"))
    assert found.returncode != 0 and "S3cretPw" not in found.stdout + found.stderr
    assert "address" in found.stdout + found.stderr
