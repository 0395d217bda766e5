"""A driver that kills itself.

`python -m tests.pipeline.sinks.sql_crash_process URL` reads actions, and runs each in a fork of its own.

A line is an action and the number of the write before which the process gets SIGKILL; the answer is how
it ended: `killed`, or `done` when there were fewer.
"""

import os
import signal
import sys
import tempfile

import sqlalchemy as sa
from sqlalchemy import event
from tests.pipeline.sinks.sql_sink_steps import Story


def die_at(number: int) -> None:
    """Kill this process before write or commit `number` of its engines; reads do not count."""
    left = [number]

    def count(*about: object) -> None:
        statement = str(about[2]) if len(about) > 2 else "COMMIT"
        left[0] -= not statement.lstrip().startswith(("SELECT", "SHOW", "PRAGMA", "SET", "BEGIN", "DESCRIBE"))
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(sa.Engine, "before_cursor_execute", count)
    event.listen(sa.Engine, "commit", count)


def warm_up() -> None:
    """Run the story once elsewhere, so that forks need no further imports."""
    with tempfile.TemporaryDirectory() as folder:
        story = Story(f"sqlite:///{folder}/warm.db")
        for act in (story.begin, story.load, story.apply):
            act()
        story.sink.close()


def main(url: str) -> None:
    warm_up()
    for line in sys.stdin:
        action, number = line.split()
        child = os.fork()
        if not child:
            story = Story(url)
            die_at(int(number))
            getattr(story, action)()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        ended = {signal.SIGKILL: "killed"}.get(os.WTERMSIG(status), "broken") if os.WIFSIGNALED(status) else "done"
        print("broken" if status == 256 else ended, flush=True)


main(sys.argv[1])
