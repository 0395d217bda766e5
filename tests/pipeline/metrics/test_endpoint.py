"""The endpoint of the metrics: what it answers, and which addresses it refuses."""

from __future__ import annotations

import socket

import httpx
import pytest
from tests.suite.deadlines import PATIENCE

from headwater.errors import ConfigError
from headwater.pipeline.metrics import endpoint
from headwater.pipeline.metrics.endpoint import CONTENT_TYPE, serve_metrics


def test_metrics_are_served_as_they_are_at_each_request(capfd: pytest.CaptureFixture[str]) -> None:
    texts = iter(["a 1.0\n", "a 2.0\n"])
    with serve_metrics("127.0.0.1:0", lambda: next(texts)) as url:
        first, second = httpx.get(url, timeout=PATIENCE), httpx.get(f"{url}?x=1", timeout=PATIENCE)
    assert (first.text, second.text) == ("a 1.0\n", "a 2.0\n")
    assert first.headers["content-type"] == CONTENT_TYPE and first.headers["server"] == "headwater"
    assert capfd.readouterr() == ("", "")


def test_other_paths_and_methods_are_refused() -> None:
    with serve_metrics("127.0.0.1:0", lambda: "a 1.0\n") as url:
        assert httpx.get(url.replace("/metrics", "/"), timeout=PATIENCE).status_code == 404
        assert httpx.post(url, timeout=PATIENCE).status_code == 501


def test_client_that_sends_no_request_delays_neither_others_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint._Handler, "timeout", None)  # an end that waits for the client would never come
    with serve_metrics("127.0.0.1:0", lambda: "a 1.0\n") as url:
        port = httpx.URL(url).port
        silent = socket.create_connection(("127.0.0.1", port or 0))
        assert httpx.get(url, timeout=PATIENCE).text == "a 1.0\n"
    silent.close()


def test_client_that_leaves_prints_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    with serve_metrics("127.0.0.1:0", lambda: "a 1.0\n" * 1_000_000) as url:
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close by a reset
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert client.recv(1)
        assert httpx.get(url, timeout=PATIENCE).status_code == 200
    assert capfd.readouterr() == ("", "")


def test_closed_endpoint_frees_its_port() -> None:
    with serve_metrics("127.0.0.1:0", str) as url:
        address = f"127.0.0.1:{httpx.URL(url).port}"
        with pytest.raises(ConfigError, match="Address already in use") as caught, serve_metrics(address, str):
            pass
        assert "port" in caught.value.hint
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, timeout=PATIENCE)
    with serve_metrics(address, str):
        pass


def test_address_of_another_machine_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="cannot serve metrics on 192.0.2.1:9109"),
        serve_metrics("192.0.2.1:9109", str),
    ):
        pass
