"""Fair threads: a busy database leaves threads to the others, and a cancelled caller loses no thread."""

import asyncio
import random
import threading
from typing import Any

import pytest
from tests.suite.deadlines import PATIENCE

from headwater.errors import Busy, Unavailable
from headwater.feeds.fair_threads import Threads, Turns
from headwater.model.work.work_context import CALLER, WHOSE, shared_context


def asking(turns: Turns, database: str, order: list[str]) -> "asyncio.Task[None]":
    """Start a call that holds its thread until the loop yields, and appends `database` to `order`."""

    whose = database, "caller of " + database

    async def one() -> None:
        if not turns.take(whose):
            await turns.wait(whose)
        try:
            order.append(database)
            await asyncio.sleep(0)
        finally:
            turns.give_back(whose)

    return asyncio.ensure_future(one())


def test_last_caller_does_not_wait_for_all_calls_of_another() -> None:
    async def main() -> list[str]:
        turns, order = Turns(1), []
        await asyncio.gather(*[asking(turns, whose, order) for whose in ["a"] * 50 + ["b", "c"]])
        return order

    order = asyncio.run(main())
    assert len(order) == 52 and order.index("b") <= 3 and order.index("c") <= 4


def test_database_never_has_every_thread() -> None:
    turns = Turns(8)
    assert [turns.take(("a", str(caller))) for caller in range(8)] == [True] * 6 + [False] * 2
    assert turns.take(("b", "x")) and turns.take(("b", "x")) and not turns.take(("c", "x"))
    turns.give_back(("a", "0"))
    assert turns.take(("c", "x"))


def test_caller_never_has_every_thread_of_its_database() -> None:
    turns = Turns(8)
    assert [turns.take(("a", "x")) for _ in range(6)] == [True] * 5 + [False]
    assert turns.take(("a", "y")) and not turns.take(("a", "y"))
    turns.give_back(("a", "x"))
    assert turns.take(("a", "y"))


@pytest.mark.parametrize(("threads", "share"), [(1, 1), (2, 1), (3, 2), (4, 2), (8, 5)])
def test_caller_leaves_one_of_few_threads_to_others(threads: int, share: int) -> None:
    turns = Turns(threads)
    assert [turns.take(("a", "x")) for _ in range(threads)] == [True] * share + [False] * (threads - share)
    assert turns.take(("a", "")) == (threads > 1), "the hub of the database works without a caller"


def test_caller_does_not_wait_for_all_calls_of_another() -> None:
    async def main() -> list[str]:
        turns, order = Turns(2), list[str]()

        async def one(caller: str) -> None:
            if not turns.take(("a", caller)):
                await turns.wait(("a", caller))
            order.append(caller)
            await asyncio.sleep(0)
            turns.give_back(("a", caller))

        await asyncio.gather(*[one(caller) for caller in ["x"] * 50 + ["y"]])
        return order

    order = asyncio.run(main())
    assert len(order) == 51 and order.index("y") <= 4


def test_too_many_calls_of_one_database_are_busy_and_others_are_not() -> None:
    async def main() -> None:
        turns, order = Turns(1, most=3), []
        held = [asking(turns, "a", order) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await turns.wait(("a", "x"))
        await asyncio.gather(*held, asking(turns, "b", order))
        assert sorted(order) == ["a", "a", "a", "b"]

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(20))
def test_cancelled_call_returns_its_thread(seed: int) -> None:
    print("seed", seed)
    chance = random.Random(seed)

    async def main() -> Turns:
        turns, order = Turns(4), list[str]()
        tasks = list[asyncio.Task[None]]()
        for _ in range(300):
            tasks.append(asking(turns, chance.choice("abc"), order))
            if chance.random() < 0.4:
                chance.choice(tasks[-20:]).cancel()
            if chance.random() < 0.3:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        return turns

    turns = asyncio.run(main())
    assert [turns.take((database, "of " + database)) for database in "abcd"] == [True] * 4


def test_shared_task_does_not_wait_behind_the_calls_of_one_caller() -> None:
    async def main() -> None:
        threads, release = Threads(4, "test"), threading.Event()

        async def run(call: Any, *args: Any) -> Any:
            WHOSE.set("a")
            CALLER.set("x")
            return await threads.call(call, *args)

        async def shared() -> Any:
            WHOSE.set("a")
            CALLER.set("x")
            task = asyncio.create_task(threads.call(int, "7"), context=shared_context())
            return await task

        held = [asyncio.ensure_future(run(release.wait, PATIENCE)) for _ in range(50)]
        await asyncio.sleep(0)
        found = asyncio.ensure_future(shared())
        held[0].get_loop().call_later(0, release.set)
        assert await found == 7 and not held[-1].done(), "it finished before most calls of x"
        await asyncio.gather(*held)
        threads.close()

    asyncio.run(main())


def test_threads_run_for_the_database_of_the_task() -> None:
    async def main() -> Any:
        threads, release = Threads(4, "test"), threading.Event()

        async def run(whose: str, call: Any, *args: Any) -> Any:
            WHOSE.set(whose)
            return await threads.call(call, *args)

        held = [asyncio.ensure_future(run("a", release.wait, 20)) for _ in range(50)]
        await asyncio.sleep(0)
        found = await run("b", int, "7")
        assert not any(task.done() for task in held), "b was answered while a held all it may have"
        with pytest.raises(ValueError):
            await run("b", int, "x")
        release.set()
        await asyncio.gather(*held)
        threads.close()
        return found

    assert asyncio.run(main()) == 7


def test_cancelled_caller_does_not_free_a_running_thread() -> None:
    """Calls of one database that start and end never hold more threads than its share."""

    async def main() -> int:
        threads, release = Threads(4, "test"), threading.Event()
        begun = threading.Semaphore(0)

        def hold() -> None:
            begun.release()
            release.wait(PATIENCE)

        async def run(whose: str, call: Any, *args: Any, caller: str = "") -> Any:
            WHOSE.set(whose)
            CALLER.set(caller)
            return await threads.call(call, *args)

        try:
            for caller in "xyz":
                held = asyncio.ensure_future(run("a", hold, caller=caller))
                await asyncio.to_thread(begun.acquire)
                held.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await held
            last = asyncio.ensure_future(run("a", hold))
            found: int = await asyncio.wait_for(run("b", int, "7"), PATIENCE)
            assert not begun.acquire(blocking=False), "a waits: its three threads are still at work"
        finally:
            release.set()
        await last
        assert begun.acquire(blocking=False)
        threads.close()
        return found

    assert asyncio.run(main()) == 7


def test_work_in_threads_of_feeds_knows_its_caller() -> None:
    async def main() -> Any:
        threads = Threads(2, "test")
        try:
            CALLER.set("ada")
            return await threads.call(CALLER.get)
        finally:
            threads.close()

    assert asyncio.run(main()) == "ada"


def test_closed_threads_are_unavailable_and_hold_no_thread() -> None:
    async def main() -> None:
        threads = Threads(1, "test")
        threads.close()
        for _ in range(3):
            with pytest.raises(Unavailable, match="stopping"):
                await asyncio.wait_for(threads.call(int), PATIENCE)

    asyncio.run(main())


def test_call_that_waits_for_a_thread_when_the_threads_stop_is_refused_as_unavailable() -> None:
    async def main() -> None:
        threads, begun, release = Threads(1, "test"), threading.Event(), threading.Event()

        def hold() -> None:
            begun.set()
            release.wait(PATIENCE)

        running = asyncio.ensure_future(threads.call(hold))
        await asyncio.to_thread(begun.wait, PATIENCE)
        waiting = asyncio.ensure_future(threads.call(int))
        await asyncio.sleep(0)  # the call is in the queue
        threads._pool.shutdown(wait=False)  # `close`, without its wait for the call that runs
        release.set()
        await running
        with pytest.raises(Unavailable, match="stopping"):
            await asyncio.wait_for(waiting, PATIENCE)

    asyncio.run(main())


def test_caller_has_one_share_in_all_databases() -> None:
    turns = Turns(8)
    assert [turns.take((str(database), "x")) for database in range(8)] == [True] * 5 + [False] * 3
    assert turns.take(("a", "y")) and turns.take(("b", "")) and turns.take(("c", ""))
    turns.give_back(("0", "x"))
    assert turns.take(("9", "x"))


def test_granted_call_that_has_not_begun_when_its_threads_stop_is_refused_as_unavailable() -> None:
    async def main() -> None:
        threads, begun, release = Threads(2, "test"), threading.Event(), threading.Event()
        threads._pool._max_workers = 1  # a call that was granted a thread stays in the queue of the pool

        def hold() -> None:
            begun.set()
            release.wait(PATIENCE)

        async def run(caller: str, call: Any) -> Any:
            CALLER.set(caller)
            return await threads.call(call)

        running = asyncio.ensure_future(run("x", hold))
        await asyncio.to_thread(begun.wait, PATIENCE)
        queued = asyncio.ensure_future(run("y", int))
        await asyncio.sleep(0)  # the call is submitted
        threads._pool.shutdown(wait=False, cancel_futures=True)
        release.set()
        await running
        with pytest.raises(Unavailable, match="stopping"):
            await asyncio.wait_for(queued, PATIENCE)

    asyncio.run(main())
