"""Connection failures: the errors when TLS is used on one side only, or with an unknown certificate."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serve.certificates import Authority
from tests.serve.server_fixture import Client, NoDatabases, serving
from tests.suite.deadlines import PATIENCE

from headwater.cli.failure import UNREACHABLE, Failure
from headwater.cli.feed import Feed
from headwater.cli.filters import FeedTarget
from headwater.cli.remote import Remote
from headwater.client.tls_trust import tls_context

MAIN = FeedTarget("main", None)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def secure(authority: Authority) -> Iterator[Client]:
    certificate, key = authority.issue()
    with serving(NoDatabases(), tls_cert=str(certificate), tls_key=str(key)) as client:
        yield client


def complaints(url: str, ca: Path | None = None) -> set[tuple[str, str]]:
    """Return message and hint of a single request and of a feed to `url`."""
    said = set()
    file = None if ca is None else str(ca)
    remote = Remote(url, ca=file)
    feed = Feed(url, MAIN, {}, tls=tls_context(file) if url.startswith("https") else None)
    for ask in (lambda: remote.call("system.ping"), lambda: next(feed.follow())):
        with pytest.raises(Failure) as found:
            ask()
        assert found.value.exit_code == UNREACHABLE
        said.add((found.value.message, found.value.hint))
    remote.close()
    return said


def test_certificate_of_an_unknown_authority_is_refused_with_a_hint_to_the_ca_option(
    secure: Client, authority: Authority
) -> None:
    url = secure.server.url
    ((message, hint),) = complaints(url)
    assert message.startswith(f"the certificate of {url} is not trusted: unable to get local issuer")
    assert "--ca FILE" in hint and "HEADWATER_CA" in hint
    remote = Remote(url, ca=str(authority.file))
    assert remote.call("system.ping")["pong"]
    remote.close()


def test_certificate_for_another_name_is_refused_with_a_hint_to_its_name(authority: Authority) -> None:
    certificate, key = authority.issue()
    with serving(NoDatabases(), http="127.0.0.2:0", tls_cert=str(certificate), tls_key=str(key)) as client:
        ((message, hint),) = complaints(client.server.url, authority.file)
    assert "IP address mismatch" in message and "as its certificate does" in hint


def test_http_to_a_port_with_tls_is_refused_with_the_https_url(secure: Client) -> None:
    address = secure.server.url.removeprefix("https://")
    assert complaints(f"http://{address}") == {(f"{address} speaks TLS", f"Use --server https://{address}.")}


def test_https_to_a_port_without_tls_is_refused_with_the_http_url() -> None:
    with serving(NoDatabases()) as client:
        address = client.server.url.removeprefix("http://")
        assert complaints(f"https://{address}") == {
            (f"{address} does not speak TLS", f"Use --server http://{address}.")
        }


def test_connection_closed_without_an_answer_is_reported_with_a_hint() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up(times: int) -> None:
            for _ in range(times):
                with listener.accept()[0] as connection:
                    connection.recv(65_536)

        address = f"127.0.0.1:{listener.getsockname()[1]}"
        for scheme, times in (("http", 4), ("https", 2)):  # over http those who ask look a second time
            thread = threading.Thread(target=hang_up, args=(times,))
            thread.start()
            said = complaints(f"{scheme}://{address}")
            thread.join(PATIENCE)
            start = "no server answers at" if scheme == "http" else "TLS with"
            assert all(message.startswith(f"{start} {scheme}://{address}") and hint for message, hint in said)
