"""Tests of streams, 304 answers and pulls, run again over TLS, and of our clients' trust in a certificate."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance import (
    test_arrow_changes,
    test_client_disconnects,
    test_client_frames,
    test_pull,
    test_repeated_requests,
    test_stream_frames,
)
from tests.conformance.live_server import Live
from tests.conformance.test_repeated_requests import counted
from tests.serve.certificates import Authority

from headwater.client import AsyncClient, Client
from headwater.errors import ConfigError

SAME = (
    *(test_stream_frames, test_repeated_requests, test_client_frames, test_arrow_changes),
    test_client_disconnects.test_idle_stream_is_closed_when_its_client_disconnects,
    test_client_disconnects.test_stream_is_closed_when_its_socket_breaks,
    test_client_disconnects.test_stalled_stream_is_closed_when_its_client_disconnects,
    test_client_disconnects.test_stalled_reader_does_not_delay_another_reader,
    test_client_disconnects.test_server_stop_sends_each_stream_a_last_checkpoint_and_ends_it,
    test_client_disconnects.test_stream_resumes_after_a_restart_without_gaps_or_duplicates,
    test_pull.test_snapshot_of_a_version_and_later_changes_fold_to_the_table,
    test_pull.test_pulled_version_is_immutable_and_its_tag_gives_304,
    test_pull.test_killed_worker_is_restarted_by_the_next_request,
    test_pull.test_pulled_rows_bytes_and_cache_hits_are_counted,
)
PLAIN = {"test_http_1_0_client_receives_an_unchunked_stream"}  # writes to its socket itself
__all__ = ["counted"]  # a fixture of theirs
for each in SAME:
    found = vars(each) if not callable(each) else {each.__name__: each}
    globals().update({name: test for name, test in found.items() if name.startswith("test_") and name not in PLAIN})


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Yield settings of a server whose certificate is trusted by everything in this process meanwhile."""
    authority = Authority(tmp_path_factory.mktemp("tls"))
    certificate, key = authority.issue()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(authority.file))
        yield {"tls_cert": str(certificate), "tls_key": str(key)}


@pytest.fixture(scope="module")
def shared(certified: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    live = Live(tmp_path_factory.mktemp("shared"), serve=certified)
    assert live.url.startswith("https://")
    yield live
    live.stop()


@pytest.fixture
def make_live(certified: dict[str, Any]) -> Callable[..., Live]:
    def make(data: Path, **settings: Any) -> Live:
        return Live(data, serve=certified | settings.pop("serve", {}), **settings)

    return make


# --- our own clients ---------------------------------------------------------------------------------------


def headwater(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    untrusting = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}
    command = [sys.executable, "-m", "headwater", *words]
    return subprocess.run(
        command, env=untrusting | environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_commands_trust_only_the_configured_certificate_authority(server: Live, table: str) -> None:
    authority = os.environ["SSL_CERT_FILE"]
    server.sql(f"INSERT INTO {table}(id) VALUES (1)")
    asked = ("sql", f"SELECT id FROM {table}", "--server", server.url)
    refused = headwater(*asked)
    assert refused.returncode != 0 and "certificate" in refused.stderr
    assert headwater(*asked, "--ca", authority).returncode == 0
    assert headwater(*asked, HEADWATER_CA=authority).returncode == 0
    wrong = headwater(*asked, "--ca", __file__)
    assert wrong.returncode != 0 and "--ca" in wrong.stderr
    told = headwater("tail", table, "--since", "earliest", "--limit", "1", "--server", server.url, "--ca", authority)
    assert told.returncode == 0, told.stderr
    assert table in told.stdout


def test_client_trusts_the_certificate_authority_in_headwater_ca(
    server: Live, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = os.environ["SSL_CERT_FILE"]
    monkeypatch.delenv("SSL_CERT_FILE")
    with Client(server.url, patience=0) as client, pytest.raises(ConfigError, match="not trusted"):
        client.call("system.ping")
    monkeypatch.setenv("HEADWATER_CA", authority)
    with Client(server.url, patience=0) as client:
        assert client.call("system.ping")["pong"] is True

    async def ping() -> bool:
        async with AsyncClient(server.url, patience=0) as other:
            return (await other.call("system.ping"))["pong"] is True

    assert asyncio.run(ping())
    monkeypatch.setenv("HEADWATER_CA", __file__)
    with pytest.raises(ConfigError, match="no certificates"):
        Client(server.url)
    with Client("http://127.0.0.1:1") as client:
        assert client, "without TLS nobody looks at it"
