"""The Python client of a Headwater server: what the pipeline uses, and anybody else may.

Client, AsyncClient ── asking ──┬── protocol   requests, answers, errors
      │                         ├── walking    pulls, range by range, until they are whole
 connections, httpx             └── frames     feeds, connection by connection
"""

from typing import TYPE_CHECKING, Any

from headwater.client.client import Client
from headwater.client.responses import Described, Page, Range, Registered, Subscribed

if TYPE_CHECKING:
    from headwater.client.async_client import AsyncClient

__all__ = ["AsyncClient", "Client", "Described", "Page", "Range", "Registered", "Subscribed"]


def __getattr__(name: str) -> Any:
    # httpx is loaded by those only who want to wait for it.
    if name == "AsyncClient":
        from headwater.client.async_client import AsyncClient

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
