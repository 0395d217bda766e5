"""An execution shared by several callers: a limit of the first caller is not an error for the others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headwater.errors import Busy
from headwater.model.work.work_context import CALLER
from headwater.queries import answers
from headwater.queries.answers import Answering


def test_busy_of_the_first_caller_is_not_returned_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_moment", lambda seen: (seen,))
    asked: list[str] = []

    async def execute(instance: Any) -> str:
        asked.append(CALLER.get())
        await asyncio.sleep(0)
        if CALLER.get() == "eve":
            raise Busy("a statement of 'eve' still runs")
        return "rows"

    room = SimpleNamespace(_flights={}, numbers=SimpleNamespace(shared=0), _execute=execute)

    async def ask(name: str) -> Any:
        CALLER.set(name)
        executed = cast(Any, Answering._executed)
        return await executed(room, SimpleNamespace(key="q"), 7)

    async def main() -> list[Any]:
        return await asyncio.gather(*[ask(name) for name in ("eve", "ada", "bob")], return_exceptions=True)

    refused, ada, bob = asyncio.run(main())
    assert isinstance(refused, Busy) and ada == bob == ("rows", False)
    assert asked == ["eve", "ada", "bob"] and not room._flights and room.numbers.shared == 2
