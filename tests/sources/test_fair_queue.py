"""Callers take turns in a queue."""

from headwater.sources.fair_queue import FairQueue


def test_queue_takes_jobs_of_callers_in_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for job in ("x1", "x2", "x3", "y1", "z1", "x4"):
        queue.put(job[0], job)
    assert len(queue) == 6
    assert [queue.take() for _ in range(7)] == ["x1", "y1", "z1", "x2", "x3", "x4", None]
    assert not queue


def test_caller_at_its_share_yields_the_rest_to_another_caller() -> None:
    queue: FairQueue[str] = FairQueue(share=2)
    for job in ("x1", "x2", "x3", "y1"):
        queue.put(job[0], job)
    assert [queue.take() for _ in range(4)] == ["x1", "y1", "x2", None]
    assert len(queue) == 1
    queue.done("y")
    assert queue.take() is None
    queue.done("x")
    assert queue.take() == "x3"
