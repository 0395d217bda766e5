"""The bridge from threads to the loop: results, errors, cancellation, limits, one wake-up for many results."""

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest
from tests.suite.deadlines import PATIENCE

from headwater.errors import Busy, NotFound
from headwater.model.principal import ANONYMOUS
from headwater.model.work.work_context import CALLER
from headwater.serve.thread_bridge import Bridge


def run(main: Any, **settings: int) -> Any:
    bridge = Bridge(**{"threads": 2} | settings)
    try:
        return asyncio.run(main(bridge))
    finally:
        bridge.close()


def test_thread_future_result_or_exception_is_delivered_to_the_awaiting_coroutine() -> None:
    async def main(bridge: Bridge) -> None:
        good: Future[int] = Future()
        bad: Future[int] = Future()
        waiting = bridge.wait(good), bridge.wait(bad)
        good.set_result(7)
        bad.set_exception(NotFound("gone"))
        assert await waiting[0] == 7
        with pytest.raises(NotFound):
            await waiting[1]

    run(main)


def test_futures_that_finish_together_wake_the_loop_once() -> None:
    async def main(bridge: Bridge) -> int:
        loop = asyncio.get_running_loop()
        wakes = 0
        real = loop.call_soon_threadsafe

        def counted(*args: Any, **named: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return real(*args, **named)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        futures: list[Future[int]] = [Future() for _ in range(100)]
        waiting = [bridge.wait(future) for future in futures]

        def commit() -> None:
            for place, future in enumerate(futures):
                future.set_result(place)

        thread = threading.Thread(target=commit)
        thread.start()
        thread.join()  # the loop is held: all are done before it looks
        assert await asyncio.gather(*waiting) == list(range(100))
        return wakes

    assert run(main) == 1


def test_cancelling_one_bridge_wait_does_not_affect_other_waits() -> None:
    async def main(bridge: Bridge) -> None:
        first: Future[int] = Future()
        second: Future[int] = Future()
        waiting = bridge.wait(first), bridge.wait(second)
        waiting[0].cancel()
        first.set_result(1)
        second.set_result(2)
        assert await waiting[1] == 2
        assert not first.cancelled()

    run(main)


def test_results_of_many_threads_are_all_delivered() -> None:
    async def main(bridge: Bridge) -> None:
        futures: list[Future[int]] = [Future() for _ in range(2000)]
        waiting = [bridge.wait(future) for future in futures]

        def finish(start: int) -> None:
            for place in range(start, 2000, 4):
                futures[place].set_result(place)

        threads = [threading.Thread(target=finish, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        assert await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE) == list(range(2000))
        for thread in threads:
            thread.join()

    run(main)


def test_too_many_waiting_calls_are_busy() -> None:
    async def main(bridge: Bridge) -> None:
        release = threading.Event()
        held = [asyncio.create_task(bridge.call(release.wait, 20)) for _ in range(3)]
        await asyncio.sleep(0)  # the tasks start
        with pytest.raises(Busy):
            await bridge.call(int)
        release.set()
        await asyncio.gather(*held)
        assert await bridge.call(int, "5") == 5

    run(main, most=3)


def test_caller_with_its_share_of_waiting_calls_is_busy_and_others_are_not() -> None:
    async def main(bridge: Bridge) -> None:
        release = threading.Event()

        async def call(name: str) -> None:
            CALLER.set(name)
            await bridge.call(release.wait, PATIENCE)

        held = [asyncio.create_task(call("ada")) for _ in range(1 + 3)]  # one has a thread
        await asyncio.sleep(0)  # the tasks start
        with pytest.raises(Busy, match="of your requests"):
            await asyncio.create_task(call("ada"))
        held += [asyncio.create_task(call(name)) for name in ["bob", *[ANONYMOUS.name] * 5]]
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*held)
        await call("ada")

    run(main, most=12)


def test_call_in_a_thread_has_the_caller_of_its_task() -> None:
    async def main(bridge: Bridge) -> Any:
        CALLER.set("ada")
        return await bridge.call(CALLER.get)

    assert run(main) == "ada"
