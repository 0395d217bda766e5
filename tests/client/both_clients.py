"""One interface to the sync and the async client, so that every fault test runs with both."""

import asyncio
import inspect
import itertools
import random
from collections.abc import Callable
from contextlib import aclosing, closing
from typing import Any

from headwater.client import AsyncClient, Client

Ask = Callable[[Any], Any]


def ask_sync(url: str, ask: Ask, *, first: int | None = None, **settings: Any) -> Any:
    """Return the result of `ask` on a sync client; of an iterator the list of its items, at most `first`."""
    with Client(url, random=random.Random(1), **settings) as client:
        found = ask(client)
        if not inspect.isgenerator(found):
            return found
        with closing(found) as told:
            return list(itertools.islice(told, first))


def ask_async(url: str, ask: Ask, *, first: int | None = None, **settings: Any) -> Any:
    """Return the result of `ask` on an async client; of an iterator the list of its items, at most `first`."""

    async def main() -> Any:
        async with AsyncClient(url, random=random.Random(1), **settings) as client:
            found = ask(client)
            if not inspect.isasyncgen(found):
                return await found
            told: list[Any] = []
            async with aclosing(found) as rest:
                while first is None or len(told) < first:
                    try:
                        told.append(await anext(rest))
                    except StopAsyncIteration:
                        break
            return told

    return asyncio.run(main())
