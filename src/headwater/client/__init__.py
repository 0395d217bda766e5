"""The Python client of a Headwater server; the pipeline and the command line use it, too.

Client, AsyncClient ── methods ── transfer ──┬── pull_state   pulls, range by range, until they are complete
      │                                      └── sse          feeds, connection by connection
http_connections, httpx        protocol: requests, answers, errors
"""

from typing import TYPE_CHECKING, Any

from headwater.client.client import Client
from headwater.client.responses import Described, Page, Registered, Subscribed
from headwater.model.keys.range import Range

if TYPE_CHECKING:
    from headwater.client.async_client import AsyncClient

__all__ = ["AsyncClient", "Client", "Described", "Page", "Range", "Registered", "Subscribed"]


def __getattr__(name: str) -> Any:
    # Only AsyncClient needs httpx.
    if name == "AsyncClient":
        from headwater.client.async_client import AsyncClient

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
