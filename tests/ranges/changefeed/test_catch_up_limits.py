"""Catch-up limits per caller: a budget that refills with time, and slots that callers wait for."""

import asyncio

import pytest

from headwater.errors import LimitExceeded
from headwater.ranges.changefeed.catch_up_limits import CatchUpLimits


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_debt_is_paid_back_with_time() -> None:
    async def main() -> None:
        clock = Clock()
        catchups = CatchUpLimits(2, 600, clock=clock)
        async with catchups.slot("a", 5_000):  # whoever has anything left may begin
            pass
        with pytest.raises(LimitExceeded) as refused:
            async with catchups.slot("a", 1):
                pass
        wait = refused.value.extra["retry_after_ms"] / 1000
        assert wait == pytest.approx(440.1, abs=0.2)  # 4,400 in debt, 10 a second
        async with catchups.slot("b", 1):
            pass  # others are not concerned
        clock.now += wait - 1
        with pytest.raises(LimitExceeded):
            async with catchups.slot("a", 1):
                pass
        clock.now += 2
        async with catchups.slot("a", 1):
            pass

    asyncio.run(main())


def test_late_catch_up_waits_and_leaving_frees_its_slot() -> None:
    async def main() -> None:
        catchups = CatchUpLimits(1, 10**9)
        order: list[str] = []

        async def read(name: str, may_end: asyncio.Event) -> None:
            async with catchups.slot("a", 1):
                order.append(name)
                await may_end.wait()

        ends = [asyncio.Event() for _ in range(3)]
        tasks = [asyncio.create_task(read(name, end)) for name, end in zip("xyz", ends, strict=True)]
        while len(order) < 1 or catchups.waiting < 2:
            await asyncio.sleep(0)
        assert (catchups.running, catchups.waiting, order) == (1, 2, ["x"])
        async with catchups.slot("b", 1):
            assert catchups.running == 2  # of another caller
        tasks[1].cancel()  # leaves the queue
        ends[0].set()
        while order != ["x", "z"]:
            await asyncio.sleep(0)
        tasks[2].cancel()  # leaves in the midst
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (catchups.running, catchups.waiting) == (0, 0)

    asyncio.run(main())


def test_accounts_with_full_budget_are_removed() -> None:
    async def main() -> None:
        clock = Clock()
        catchups = CatchUpLimits(1, 60, clock=clock)
        for number in range(50):
            async with catchups.slot(f"caller {number}", 1):
                pass
        clock.now += 60
        async with catchups.slot("last", 1):
            assert len(catchups._accounts) == 1

    asyncio.run(main())
