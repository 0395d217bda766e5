"""One way to ask by the sync and by the async client, so that every test of faults runs with both."""

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
    """What `ask` gets from a client: a result, or the list of what an iterator gives, or its `first` ones."""
    with Client(url, random=random.Random(1), **settings) as client:
        found = ask(client)
        if not inspect.isgenerator(found):
            return found
        with closing(found) as told:
            return list(itertools.islice(told, first))


def ask_async(url: str, ask: Ask, *, first: int | None = None, **settings: Any) -> Any:
    """The same by the async client."""

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
