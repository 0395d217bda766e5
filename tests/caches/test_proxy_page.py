"""nginx as docs/operations.md shows it, with TLS before both ports of a real server."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.caches.proxy_processes import NGINX, Front, program, put
from tests.doc_pages import blocks, page
from tests.guarantees.server_process import ServerProcess
from tests.serve.certificates import Authority
from tests.suite.deadlines import PATIENCE

TOKEN = "key-of-the-test"
HEADERS = {"authorization": f"Bearer {TOKEN}"}


class Proxy(Front):
    """nginx with TLS in front of `server`."""

    def __init__(self, folder: Path, server: ServerProcess, authority: Authority) -> None:
        self._server, self._files = server, authority.issue()
        super().__init__(folder, 0)

    def command(self) -> list[str]:
        ((_, shown),) = blocks(page("docs/operations.md"), "nginx")
        certificate, key = self._files
        places = {
            "listen 443 ": f"listen 127.0.0.1:{self.port} ",
            "127.0.0.1:7171": self._server.url.removeprefix("http://"),
            "127.0.0.1:7172": self._server.grpc,
            "/etc/headwater/server.pem": str(certificate),
            "/etc/headwater/server.key": str(key),
        }
        user = "user root;" if os.getuid() == 0 else ""
        settings = NGINX.format(user=user, folder=self.folder, settings=put(shown, places))
        (self.folder / "nginx.conf").write_text(settings)
        return [str(program("nginx")), "-p", str(self.folder), "-c", f"{self.folder}/nginx.conf", "-e", "stderr"]


@pytest.fixture
def server(place: Path) -> Iterator[ServerProcess]:
    made = ServerProcess(place / "data", f'serve.token = "{TOKEN}"\n')
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def authority(place: Path) -> Authority:
    return Authority(place)


@pytest.fixture
def proxy(place: Path, server: ServerProcess, authority: Authority) -> Iterator[Proxy]:
    if program("nginx") is None:
        missing = "NO nginx, so nothing was tried through it: `make services`, or install nginx"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    made = Proxy(place / "nginx", server, authority)
    yield made
    made.close()


def test_documented_proxy_forwards_requests_and_streams(proxy: Proxy, authority: Authority) -> None:
    trusted = ssl.create_default_context(cafile=str(authority.file))
    with httpx.Client(base_url=f"https://localhost:{proxy.port}", verify=trusted, timeout=PATIENCE) as client:
        assert client.get("/readyz").status_code == 200
        assert client.post("/api/v1/rpc", json={"id": 1, "method": "system.ping"}).status_code == 401
        client.headers.update(HEADERS)
        body = {"id": 1, "method": "sql.exec", "params": {"sql": "CREATE TABLE notes(id INTEGER PRIMARY KEY)"}}
        assert client.post("/api/v1/rpc", json=body).json()["ok"]
        with client.stream("GET", "/api/v1/changes/main/notes?start=earliest&format=plain_json") as stream:
            assert any("CREATE TABLE notes" in line for line in stream.iter_lines())


def test_documented_proxy_forwards_grpc(proxy: Proxy, authority: Authority) -> None:
    trusted = grpc.ssl_channel_credentials(authority.file.read_bytes())
    with grpc.secure_channel(f"localhost:{proxy.port}", trusted) as channel:
        found = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        assert found.status == health_pb2.HealthCheckResponse.SERVING
        scan = channel.unary_stream("/sochdb.v1.KvService/Scan")
        with pytest.raises(grpc.RpcError) as refused:
            list(scan(b"", timeout=PATIENCE))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert list(scan(b"", timeout=PATIENCE, metadata=list(HEADERS.items()))) == []
        ranges = channel.unary_unary("/headwater.v1.PullService/ListRanges")
        with pytest.raises(grpc.RpcError) as refused:
            ranges(b"", timeout=PATIENCE, metadata=list(HEADERS.items()))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND  # ours says so: no table is named
