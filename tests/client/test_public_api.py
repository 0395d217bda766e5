"""The public API: a light import, the same methods of both clients, and nothing left open."""

import inspect
import subprocess
import sys

import pytest

import headwater.client
from headwater.client import AsyncClient, Client
from headwater.errors import ConfigError


def test_importing_the_client_loads_neither_arrow_nor_httpx() -> None:
    code = "import sys, headwater.client; print([name for name in ('pyarrow', 'httpx') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_public_names_of_the_client_exist_with_docstrings() -> None:
    for name in headwater.client.__all__:
        assert getattr(headwater.client, name).__doc__
    with pytest.raises(AttributeError):
        _ = headwater.client.Nothing


def test_both_clients_have_the_same_methods_with_the_same_parameters() -> None:
    def shown(kind: type) -> dict[str, inspect.Signature]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {
            name: inspect.signature(function).replace(return_annotation="")
            for name, function in found
            if not name.startswith("_") or name == "__init__"
        }

    assert shown(Client) == shown(AsyncClient)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_client_with_an_invalid_url_is_refused(kind: type) -> None:
    with pytest.raises(ConfigError):
        kind("ftp://127.0.0.1")


def test_client_closed_twice_raises_no_error() -> None:
    client = Client("http://127.0.0.1:1", patience=0)
    client.close()
    client.close()
