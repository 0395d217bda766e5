"""TLS on both ports: client certificates, settings refused at start, and reloads under open streams."""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.serve.certificates import Authority, pem_of
from tests.serve.server.test_pipelined_requests import POST, Held, protocol_of
from tests.serve.server_fixture import Client, NoDatabases, serving
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.config import Secret, ServeConfig
from headwater.errors import ConfigError
from headwater.serve import tls_handshakes
from headwater.serve.api import Api
from headwater.serve.limits.connection_limits import RESERVE
from headwater.serve.server.http_protocol import BoundedHttp
from headwater.serve.server.server import Server
from headwater.serve.tls import Tls
from headwater.serve.tls_handshakes import READ_BYTES, WRITE_BYTES, TlsServer


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def trusted(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.file)


def settings(authority: Authority, **more: Any) -> dict[str, Any]:
    certificate, key = authority.issue()
    return {"tls_cert": str(certificate), "tls_key": str(key), **more}


def shown(client: Client) -> str:
    """Return the name in the certificate that a new HTTP connection receives."""
    host, port = client.server.addresses[0]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((host, port), PATIENCE) as plain, context.wrap_socket(plain) as found:
        certificate = x509.load_der_x509_certificate(found.getpeercert(binary_form=True) or b"")
        return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def healthy(client: Client, *pems: Path) -> bool:
    """Return whether a new gRPC connection that trusts the first of `pems` succeeds."""
    credentials = grpc.ssl_channel_credentials(*[each.read_bytes() for each in pems])
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(client.server.grpc_address, credentials, options) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            return False
        return True


def in_loop(client: Client, call: Callable[[], Any]) -> Any:
    async def run() -> Any:
        return call()

    return asyncio.run_coroutine_threadsafe(run(), client.loop).result(PATIENCE)


def test_both_ports_accept_only_tls(authority: Authority, trusted: ssl.SSLContext) -> None:
    with serving(NoDatabases(), **settings(authority)) as client:
        assert client.server.url.startswith("https://127.0.0.1:")
        assert httpx.get(client.server.url + "/healthz", verify=trusted).json() == {"status": "ok"}
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(client.server.url + "/healthz", verify=ssl.create_default_context())
        with pytest.raises(httpx.TransportError):
            httpx.get(client.server.url.replace("https", "http") + "/healthz")
        assert healthy(client, authority.file)
        with grpc.insecure_channel(client.server.grpc_address) as channel, pytest.raises(grpc.RpcError):
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)


def test_tls_before_1_2_is_refused(authority: Authority, trusted: ssl.SSLContext) -> None:
    tls = Tls.of(ServeConfig(**settings(authority)))
    assert tls is not None and tls.context.minimum_version is ssl.TLSVersion.TLSv1_2
    with serving(NoDatabases(), **settings(authority)) as client:
        trusted.minimum_version = trusted.maximum_version = ssl.TLSVersion.TLSv1_2
        assert httpx.get(client.server.url + "/healthz", verify=trusted).status_code == 200


def test_tls_key_in_the_certificate_file_is_accepted(authority: Authority, trusted: ssl.SSLContext) -> None:
    certificate, key = authority.issue()
    certificate.write_bytes(certificate.read_bytes() + key.read_bytes())
    certificate.chmod(0o600)
    with serving(NoDatabases(), tls_cert=str(certificate)) as client:
        assert httpx.get(client.server.url + "/healthz", verify=trusted).status_code == 200
        assert healthy(client, authority.file)


# --- client certificates -----------------------------------------------------------------------------------


def test_grpc_clients_show_a_certificate_of_the_authority(authority: Authority, trusted: ssl.SSLContext) -> None:
    friend = authority.issue("friend")
    stranger = Authority(authority.folder, "elsewhere").issue("stranger")
    with serving(NoDatabases(), **settings(authority, tls_ca=str(authority.file))) as client:
        assert healthy(client, authority.file, friend[1], friend[0])
        assert not healthy(client, authority.file)
        assert not healthy(client, authority.file, stranger[1], stranger[0])
        assert httpx.get(client.server.url + "/healthz", verify=trusted).status_code == 200, "HTTP asks for none"


def test_http_clients_need_a_certificate_if_configured(authority: Authority, trusted: ssl.SSLContext) -> None:
    friend = authority.issue("friend")
    asked = settings(authority, tls_ca=str(authority.file), tls_http_clients=True)
    with serving(NoDatabases(), **asked) as client:
        with pytest.raises(httpx.TransportError):
            httpx.get(client.server.url + "/healthz", verify=trusted)
        trusted.load_cert_chain(*friend)
        assert httpx.get(client.server.url + "/healthz", verify=trusted).status_code == 200


def test_grpc_clients_of_an_authority_that_was_removed_are_refused_after_a_reload(authority: Authority) -> None:
    friend = authority.issue("friend")
    successor = Authority(authority.folder, "successor")
    trusted = authority.folder / "trusted.pem"
    trusted.write_bytes(authority.file.read_bytes())
    with serving(NoDatabases(), **settings(authority, tls_ca=str(trusted))) as client:
        assert healthy(client, authority.file, friend[1], friend[0])
        trusted.write_bytes(successor.file.read_bytes())
        assert in_loop(client, client.server.reload)
        assert not healthy(client, authority.file, friend[1], friend[0])
        renewed = successor.issue("renewed")
        assert healthy(client, authority.file, renewed[1], renewed[0])


# --- at the start ------------------------------------------------------------------------------------------


def test_invalid_tls_settings_are_refused_with_a_hint(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue()
    other = authority.issue("other")[1]
    rubbish, locked = tmp_path / "rubbish", tmp_path / "locked"
    rubbish.write_text("not a certificate")
    locked.write_bytes(pem_of(ec.generate_private_key(ec.SECP256R1()), b"secret"))
    for wrong in (
        {"tls_cert": str(certificate), "tls_key": str(other)},
        {"tls_cert": str(rubbish), "tls_key": str(key)},
        {"tls_cert": str(certificate), "tls_key": str(rubbish)},
        {"tls_cert": str(certificate), "tls_key": str(locked)},
        {"tls_cert": str(certificate)},
        {"tls_cert": str(certificate), "tls_key": str(tmp_path / "absent")},
        {"tls_cert": str(certificate), "tls_key": str(key), "tls_ca": str(rubbish)},
        {"tls_key": str(key)},
        {"tls_ca": str(authority.file)},
        {"tls_http_clients": True},
        {"tls_cert": str(certificate), "tls_key": str(key), "tls_http_clients": True},
    ):
        with pytest.raises(ConfigError) as found:
            Server(ServeConfig(http="127.0.0.1:0", **wrong), Api.over(NoDatabases()))
        assert found.value.hint, wrong
        assert "secret" not in str(found.value)


def test_key_readable_by_others_is_logged(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    asked = settings(authority)
    Tls.of(ServeConfig(**asked))
    assert not caplog.records
    Path(asked["tls_key"]).chmod(0o644)
    Tls.of(ServeConfig(**asked))
    assert "chmod 600" in caplog.text


def test_certificate_without_a_key_is_refused(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    certificate, _ = authority.issue()
    certificate.chmod(0o644)  # it is public
    with pytest.raises(ConfigError, match="contains no private key") as found:
        Tls.of(ServeConfig(tls_cert=str(certificate)))
    assert "--tls-key" in found.value.hint and not caplog.records


def test_remote_address_without_tls_is_logged(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    def warns_of_missing_tls(**more: Any) -> bool:
        caplog.clear()
        server = Server(ServeConfig(token=Secret("t" * 16), grpc="off", **more), Api.over(NoDatabases()))
        server.bind()
        server.unbind()
        return "without TLS" in caplog.text

    assert warns_of_missing_tls(http="0.0.0.0:0")
    assert not warns_of_missing_tls(http="127.0.0.1:0")
    assert not warns_of_missing_tls(http="0.0.0.0:0", **settings(authority))


# --- another certificate -----------------------------------------------------------------------------------


def test_reloaded_tls_certificate_is_used_for_new_connections_and_keeps_open_ones(
    authority: Authority, trusted: ssl.SSLContext
) -> None:
    asked, kept = settings(authority), httpx.Limits(keepalive_expiry=None)  # a new connection would be refused
    with (
        serving(NoDatabases(), **asked) as client,
        httpx.Client(base_url=client.server.url, verify=trusted, limits=kept) as old,
        grpc.secure_channel(
            client.server.grpc_address, grpc.ssl_channel_credentials(authority.file.read_bytes())
        ) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watching = stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        assert next(iter(watching)).status == health_pb2.HealthCheckResponse.SERVING
        old.get("/healthz")
        assert shown(client) == "server"
        successor = Authority(authority.folder, "successor")
        certificate, key = successor.issue("renewed")
        certificate.rename(asked["tls_cert"])
        key.rename(asked["tls_key"])
        assert shown(client) == "server", "nobody asked for it yet"
        assert in_loop(client, client.server.reload)
        assert shown(client) == "renewed"
        assert healthy(client, successor.file)
        assert not healthy(client, authority.file)
        assert old.get("/healthz").status_code == 200, "what was open goes on"
        assert watching.is_active()
        stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        watching.cancel()


def test_broken_certificate_keeps_the_old_one(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    asked = settings(authority)
    other = authority.issue("other")
    with serving(NoDatabases(), **asked) as client:
        for file, content in (
            (asked["tls_cert"], b"-----BEGIN CERTIFICATE-----\nrubbish"),
            (asked["tls_key"], other[1].read_bytes()),
            (asked["tls_key"], b""),
        ):
            before = Path(file).read_bytes()
            Path(file).write_bytes(content)
            caplog.clear()
            assert not in_loop(client, client.server.reload)
            assert "the old one remains in use" in caplog.text
            assert shown(client) == "server"
            assert healthy(client, authority.file)
            Path(file).write_bytes(before)
        Path(asked["tls_key"]).unlink()
        assert not in_loop(client, client.server.reload)
        assert shown(client) == "server"


PROGRAM = """
import asyncio, logging, sys
sys.path.insert(0, sys.argv[1])
from tests.serve.server_fixture import NoDatabases
from headwater.config import ServeConfig
from headwater.serve.api import Api
from headwater.serve.server.server import Server, loop_factory

class Told(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), flush=True)

logging.basicConfig(level=logging.INFO, handlers=[Told()])
logging.getLogger("uvicorn").setLevel(logging.WARNING)
config = ServeConfig(http="127.0.0.1:0", tls_cert=sys.argv[2], tls_key=sys.argv[3])
server = Server(config, Api.over(NoDatabases()))
with asyncio.Runner(loop_factory=loop_factory()) as runner:
    runner.run(server.serve(started=lambda: print(server.url, flush=True)))
"""


@pytest.mark.slow
def test_sighup_reloads_the_certificate(authority: Authority) -> None:
    certificate, key = authority.issue()
    words = [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[3]), str(certificate), str(key)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        url = next(line.strip() for line in process.stdout if line.startswith("https://"))  # behind warnings
        for name in ("second", "third"):
            renewed = authority.issue(name)
            renewed[0].rename(certificate)
            renewed[1].rename(key)
            os.kill(process.pid, signal.SIGHUP)
            assert "reloaded" in process.stdout.readline()
        key.write_text("")
        os.kill(process.pid, signal.SIGHUP)
        assert "the old one remains in use" in process.stdout.readline()
        context = ssl.create_default_context(cafile=authority.file)
        assert httpx.get(url + "/healthz", verify=context).status_code == 200
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


# --- handshakes that do not end ------------------------------------------------------------------------------


def is_closed(open: socket.socket) -> bool:
    """Wait for the next byte or the end of the connection; return whether it ended."""
    open.settimeout(PATIENCE)
    try:
        return open.recv(1) == b""
    except ConnectionError:
        return True


def connect(client: Client) -> socket.socket:
    return socket.create_connection(client.server.addresses[0], PATIENCE)


def test_unfinished_handshakes_are_counted_as_connections(
    authority: Authority, trusted: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TlsServer, "seconds", 3600.0)
    with serving(NoDatabases(), **settings(authority), max_connections_per_client=2) as client:
        connections = client.server._uvicorn._connections
        with contextlib.ExitStack() as stack:
            for _ in range(2 + RESERVE):
                stack.enter_context(connect(client))
            wait_until(lambda: connections.open == 2 + RESERVE, "every handshake is counted")
            assert is_closed(stack.enter_context(connect(client)))
            wait_until(lambda: connections.open == 2 + RESERVE, "it is not counted any more")
            assert connections.refused == 1
        wait_until(lambda: connections.open == 0, "every handshake that was given up is forgotten")
        assert httpx.get(client.server.url + "/healthz", verify=trusted).status_code == 200


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"], ids=["nothing", "half", "HTTP"])
def test_handshake_that_does_not_end_is_closed(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(TlsServer, "seconds", 0.2)
    with serving(NoDatabases(), **settings(authority)) as client, connect(client) as open:
        open.sendall(said)
        assert is_closed(open)
        wait_until(lambda: client.server._uvicorn._connections.open == 0, "it is not counted any more")


def test_begun_handshakes_of_one_address_are_limited(
    authority: Authority, trusted: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TlsServer, "concurrent_of_client", 1)
    monkeypatch.setattr(tls_handshakes, "ANSWER_SECONDS", PATIENCE)
    monkeypatch.setattr(TlsServer, "seconds", 2 * PATIENCE)

    def finished(address: str) -> bool:
        """Finish a handshake, and return whether the first one had ended before."""
        with (
            socket.create_connection(client.server.addresses[0], PATIENCE, (address, 0)) as plain,
            trusted.wrap_socket(plain, server_hostname="127.0.0.1"),
        ):
            return has_ended.is_set()

    hello, has_ended = ssl.MemoryBIO(), threading.Event()
    begun = trusted.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        begun.do_handshake()
    with serving(NoDatabases(), **settings(authority)) as client, ThreadPoolExecutor() as threads:
        with connect(client) as first:
            first.sendall(hello.read())
            assert first.recv(1), "the server has computed its answer"
            with connect(client), connect(client):  # they have sent nothing, and take no place
                waiting = threads.submit(finished, "127.0.0.1")
                assert not finished("127.0.0.2"), "another address has places of its own"
            has_ended.set()
        assert waiting.result(PATIENCE)


def test_server_stops_while_handshakes_are_unfinished(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TlsServer, "seconds", 3600.0)
    with contextlib.ExitStack() as stack:
        with serving(NoDatabases(), **settings(authority)) as client:
            open = stack.enter_context(connect(client))
            wait_until(lambda: client.server._uvicorn._connections.open == 1, "the handshake is counted")
        assert is_closed(open)


def test_request_sent_with_the_end_of_the_handshake_is_answered(authority: Authority, trusted: ssl.SSLContext) -> None:
    """The client sends its last bytes of the handshake and the request in one packet."""
    with serving(NoDatabases(), **settings(authority)) as client, connect(client) as open:
        read, write = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = trusted.wrap_bio(read, write, server_hostname="127.0.0.1")
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                open.sendall(write.read())
                read.write(open.recv(1 << 16))
        tls.write(b"GET /healthz HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        open.sendall(write.read())
        answer = b""
        while b'"ok"' not in answer:
            read.write(open.recv(1 << 16))
            with contextlib.suppress(ssl.SSLWantReadError):
                while data := tls.read():
                    answer += data
        assert answer.startswith(b"HTTP/1.1 200 OK")


# --- the end of a connection ---------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"", b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n"], ids=["nothing", "a request"])
def test_stop_does_not_wait_for_an_idle_client_to_end_tls(
    authority: Authority, trusted: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(BoundedHttp, "linger_seconds", 0.1)
    with contextlib.ExitStack() as stack:
        with serving(NoDatabases(), **settings(authority, drain_seconds=3600.0)) as client:
            plain = stack.enter_context(connect(client))
            idle = stack.enter_context(trusted.wrap_socket(plain, server_hostname="127.0.0.1"))
            idle.sendall(said)
            assert not said or idle.recv(65536).startswith(b"HTTP/1.1 200 ")
            protocol = protocol_of(client, idle)
            wait_until(lambda: protocol.cycle is None or protocol.cycle.response_complete, "the client is idle")
        assert protocol._linger_timer is not None, "else it was asyncio's limit of 30 s that ended the connection"


def test_stop_does_not_wait_for_an_answered_client_to_end_tls(
    authority: Authority, trusted: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedHttp, "linger_seconds", 0.1)
    held = Held()
    with contextlib.ExitStack() as stack:
        with serving(held, **settings(authority, drain_seconds=3600.0)) as client:
            plain = stack.enter_context(connect(client))
            open = stack.enter_context(trusted.wrap_socket(plain, server_hostname="127.0.0.1"))
            open.sendall(POST)
            assert held.asked.wait(PATIENCE)
            protocol = protocol_of(client, open)
            answering = stack.enter_context(ThreadPoolExecutor(1))
            answering.submit(lambda: (wait_until(lambda: protocol._is_stopping), held.go.set()))
        assert protocol._linger_timer is not None, "else it was asyncio's limit of 30 s that ended the connection"
        assert open.recv(65536).startswith(b"HTTP/1.1 200 ")


# --- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("port", ["http", "grpc"])
def test_tls_connection_has_small_transport_and_kernel_buffers(
    authority: Authority, trusted: ssl.SSLContext, port: str
) -> None:
    trusted.set_alpn_protocols(["h2" if port == "grpc" else "http/1.1"])
    with serving(NoDatabases(), **settings(authority)) as client:
        found = client.server.addresses if port == "http" else client.server.grpc_addresses
        with (
            socket.create_connection(found[0], PATIENCE) as plain,
            trusted.wrap_socket(plain, server_hostname="127.0.0.1") as open,
        ):
            if port == "http":
                transport = protocol_of(client, open).transport
            else:
                clients = client.server._grpc._acceptor._clients
                wait_until(lambda: clients, "the connection is accepted")
                transport = next(iter(clients)).transport
            wait_until(lambda: transport.get_read_buffer_limits()[1] == READ_BYTES, "the limits are set")
            assert transport.get_write_buffer_limits()[1] == WRITE_BYTES
            kernel = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            assert kernel <= 2 * READ_BYTES, "Linux doubles what it is asked for"


def test_large_body_over_tls_is_received(authority: Authority, trusted: ssl.SSLContext) -> None:
    body = {"id": "a" * 100, "method": "nowhere", "params": {"text": "x" * (4 << 20)}}
    with serving(NoDatabases(), **settings(authority)) as client:
        answer = httpx.post(client.server.url + "/api/v1/rpc", json=body, verify=trusted, timeout=PATIENCE).json()
        assert answer["error"]["code"] == "not_supported", answer
