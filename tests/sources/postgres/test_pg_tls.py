"""A server reached by TCP, TLS and a password: everything arrives, and refusals show no secrets."""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import random
import select
import socket
import socketserver
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.servers import missing
from tests.serve.certificates import Authority
from tests.sources.postgres.pg_server import DEBIAN, PATIENCE, Server
from tests.sources.postgres.pg_source import PgRig

from headwater.errors import HeadwaterError
from headwater.sources.postgres.capture import barriers
from headwater.sources.postgres.capture.decode import row_decoder
from headwater.sources.postgres.connection import Server as Address
from headwater.sources.postgres.source import PostgresSource

SECRET = "first-secret"
TABLE = "CREATE TABLE t(k int PRIMARY KEY, v text)"
HBA = "local all all trust\nhostssl all all 127.0.0.1/32 scram-sha-256\n"


class TlsServer(Server):
    """A server whose TCP clients need the password of the role `app`."""

    def __init__(self, programs: Path, authority: Authority) -> None:
        certificate, key = authority.issue()
        self.authority = authority
        if os.geteuid() == 0:
            os.chown(key, pwd.getpwnam("postgres").pw_uid, -1)
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        super().__init__(
            programs, listen_addresses="127.0.0.1", port=str(self.port), ssl="on",
            ssl_cert_file=str(certificate), ssl_key_file=str(key),
        )  # fmt: skip
        (self.folder / "data" / "pg_hba.conf").write_text(HBA)
        with self.connect() as admin:
            admin.execute(f"CREATE ROLE app SUPERUSER LOGIN PASSWORD '{SECRET}'".encode())
            admin.execute("SELECT pg_reload_conf()")

    def address(self, database: str) -> str:
        return f"{super().address(database)} port={self.port}"


class TlsRig(PgRig):
    """The source connects by TCP, the test by the UNIX socket."""

    server: TlsServer
    secret = SECRET

    @property
    def url(self) -> str:
        ca = self.server.authority.file
        address = f"127.0.0.1:{self.server.port}/{self.name}"
        return f"postgresql://app:{self.secret}@{address}?sslmode=verify-full&sslrootcert={ca}"


@pytest.fixture(scope="module")
def tls() -> Iterator[TlsServer]:
    """Yield Debian's PostgreSQL: PyPI's is built without TLS."""
    if not DEBIAN:
        missing("PostgreSQL with TLS is missing: apt-get install postgresql")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # the server is another user
        server = TlsServer(DEBIAN[-1].parent, Authority(Path(folder)))
        yield server
        server.stop()


@pytest.fixture
def own(tls: TlsServer) -> Iterator[TlsRig]:
    rig = TlsRig(tls, f"tls_{os.getpid()}_{time.monotonic_ns()}", TABLE, heartbeat_seconds=600)
    yield rig
    rig.close()


class Front(socketserver.ThreadingTCPServer):
    """A TLS proxy in front of a server, like a pooler, with TLS records as large as possible. PostgreSQL itself fills
    them from version 17 on.
    """

    block_on_close, daemon_threads = False, True

    def __init__(self, server: Server, authority: Authority) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self._to = str(server.folder / ".s.PGSQL.5432")
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(*authority.issue())
        self._thread = threading.Thread(target=self.serve_forever)
        self._thread.start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Forward one connection in its own thread."""
        request.recv(8)  # whether there is TLS
        request.sendall(b"S")
        with (
            contextlib.suppress(OSError),
            self._context.wrap_socket(request, server_side=True) as client,
            socket.socket(socket.AF_UNIX) as server,
        ):
            server.connect(self._to)
            while True:
                ready = [client] if client.pending() else select.select([client, server], [], [])[0]
                for each in ready:
                    if each is server:
                        time.sleep(0.02)  # so that much comes together, and fills records
                    if not (data := each.recv(1 << 16)):
                        return
                    (server if each is client else client).sendall(data)

    def close(self) -> None:
        """Stop, once all clients have left."""
        self.shutdown()
        self._thread.join()
        self.server_close()


@pytest.mark.parametrize("twin", [row_decoder.PYTHON, row_decoder.COMPILED], ids=["plain", "received"])
def test_rows_buffered_by_tls_are_read_without_waiting(
    pg: Server, twin: row_decoder.Twin | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Polling a socket does not show data that TLS has buffered: it must be taken first; newer libpq does so itself."""
    if twin is None:
        pytest.skip("not compiled")
    monkeypatch.setattr(row_decoder, "twin", lambda: twin)
    monkeypatch.setattr(barriers, "SECONDS", PATIENCE)  # what stays behind does so for ever
    seed, front = random.Random(0x715), Front(pg, authority := Authority(tmp_path))
    host, port = front.server_address[:2]
    more = f"sslmode=verify-full&gssencmode=disable&sslrootcert={authority.file}"
    monkeypatch.setattr(PgRig, "url", property(lambda rig: f"postgresql://postgres@{host}:{port}/{rig.name}?{more}"))
    with contextlib.closing(front):
        own = PgRig(pg, f"tls_{os.getpid()}_{twin.name}", TABLE, heartbeat_seconds=600)
        with contextlib.closing(own):
            for number in range(12):
                with own.db.transaction():
                    for each in range(seed.randrange(1, 20)):
                        text = seed.randbytes(seed.randrange(1_500)).hex()
                        own.db.execute("INSERT INTO t VALUES (%s, %s)", [number * 100 + each, text])
                own.source.head()  # raises an error if the mark of the transaction did not come
            own.pull()
            assert own.fold() == own.rows()


def test_changed_password_stops_capture_until_the_new_password_is_given(
    own: TlsRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    own.run("INSERT INTO t VALUES (1, 'before')")
    own.pull()
    own.acknowledge()
    own.run("ALTER ROLE app PASSWORD 'second-secret'")
    try:
        own.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'")
        own.run("INSERT INTO t VALUES (2, 'meanwhile')")
        end = time.monotonic() + PATIENCE
        while "password" not in str(own.source._stream and own.source._stream.error):
            assert time.monotonic() < end
            own.source.wait(0.05)
        with pytest.raises(HeadwaterError) as refused:
            own.source.head()
        assert SECRET not in f"{refused.value} {refused.value.hint} {own.source._stream and own.source._stream.error}"
        own.secret = "second-secret"
        own.open()
        own.run("INSERT INTO t VALUES (3, 'after')")
        own.pull()
        assert own.fold() == own.rows() == {1: (1, "before"), 2: (2, "meanwhile"), 3: (3, "after")}
    finally:
        own.run(f"ALTER ROLE app PASSWORD '{SECRET}'")
        own.secret = SECRET
        own.open()
    assert "secret" not in caplog.text


def test_server_certificate_of_another_authority_is_refused(own: TlsRig, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    url = own.url.replace(str(own.server.authority.file), str(stranger.file))
    source = PostgresSource(own.name, url, notes=own.notes, config=own.config)
    try:
        with pytest.raises(HeadwaterError) as refused:
            source.prove(generation="g", latest=0, read=lambda after: iter(()))
        assert "certificate" in refused.value.message and SECRET not in str(refused.value)
    finally:
        source.close()


def test_silent_server_blocks_no_other_thread_and_times_out() -> None:
    """Other threads run during the wait; then it fails without showing the password."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        url = f"postgresql://app:{SECRET}@127.0.0.1:{silent.getsockname()[1]}/x?connect_timeout=6&gssencmode=disable"
        waiting = pool.submit(Address("x", url).replicate)
        client, _ = silent.accept()  # not before the connection is made, and while nobody answers it
        with client:
            assert client.recv(8) and not waiting.done()
            with pytest.raises(HeadwaterError, match="no answer within 6 seconds") as refused:
                waiting.result(PATIENCE)
    assert SECRET not in f"{refused.value} {refused.value.hint}"
