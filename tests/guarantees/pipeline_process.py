"""The pipeline, and a Spark cluster, as separate processes: to be started, watched and killed by pid."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

WORD_SECONDS = 180.0  # longest silence of a pipeline that is neither done nor dead


def free_port() -> int:
    """Return a port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children(pid: int) -> list[int]:
    """Return all descendants of `pid`, nearest first."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                text = Path(f"/proc/{entry}/stat").read_text()
                parents.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, due = [], [pid]
    while due:
        below = parents.get(due.pop(0), [])
        found += below
        due += below
    return found


def command_of(pid: int) -> str:
    """Return the command line of a process; "" if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def kill(*pids: int) -> None:
    """Send SIGKILL to processes; ignore those that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class PipelineProcess:
    """`headwater pipeline run` on one TOML file, from an unrelated working directory."""

    def __init__(self, spec: Path, foreign: Path) -> None:
        self._spec, self._foreign = spec, foreign
        foreign.mkdir(parents=True, exist_ok=True)
        self._errors = (spec.parent / "pipeline.err").open("ab")
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._spoke = threading.Event()
        self._below: list[int] = []

    def start(self, *flags: str) -> None:
        """Start it and collect its output lines as they appear."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headwater", "pipeline", "run", str(self._spec), "--output", "json", *flags],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            cwd=self._foreign,
        )
        self._lines, self._spoke = queue.Queue(), threading.Event()
        threading.Thread(target=self._read, args=(self._process, self._lines, self._spoke), daemon=True).start()

    def _read(self, process: subprocess.Popen[str], lines: queue.Queue[str | None], spoke: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
            spoke.set()
        lines.put(None)
        spoke.set()

    def wait_for_progress(self, count: int) -> bool:
        """Wait for `count` lines of progress; return False if it ended before."""
        for _ in range(count):
            line = self._lines.get(timeout=WORD_SECONDS)
            if line is None:
                return False
        return True

    def below(self, *words: str) -> list[int]:
        """Return its child processes whose command has all these words."""
        assert self._process is not None
        return [pid for pid in children(self._process.pid) if all(word in command_of(pid) for word in words)]

    def kill_driver(self) -> None:
        """Kill the Python process alone: its child processes may run on for a while."""
        assert self._process is not None
        self._below += children(self._process.pid)
        kill(self._process.pid)
        self._end()

    def kill_all(self) -> None:
        """Kill it and all its child processes at once."""
        assert self._process is not None
        pids = [self._process.pid, *children(self._process.pid)]
        kill(*pids)
        self._end()

    def finish(self, seconds: float = 300.0) -> int:
        """Wait for its end; return its exit code."""
        assert self._process is not None
        code = self._process.wait(seconds)
        self._end()
        return code

    def stop(self) -> int:
        """Send SIGTERM after its first output, before which SIGTERM is not handled; return its exit code."""
        assert self._process is not None and self._spoke.wait(WORD_SECONDS)
        os.kill(self._process.pid, signal.SIGTERM)
        return self.finish()

    def _end(self) -> None:
        process, self._process = self._process, None
        assert process is not None and process.stdout is not None
        process.wait(60)
        while self._lines.get(timeout=60) is not None:
            pass  # until the reader has seen the end
        process.stdout.close()

    def last_words(self) -> str:
        """Return the end of its stderr."""
        return (self._spec.parent / "pipeline.err").read_text(errors="replace")[-6000:]

    def close(self) -> None:
        """Kill everything that still runs."""
        if self._process is not None:
            self.kill_all()
        kill(*(pid for pid in self._below if "spark" in command_of(pid)))
        self._errors.close()


class Cluster:
    """A standalone Spark master with two workers, from the pip installation."""

    def __init__(self, folder: Path, java: str) -> None:
        self._folder, self._java = folder, java
        self._port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._out = (folder / "cluster.out").open("ab")
        self.url = f"spark://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start all three and wait until the master has both workers."""
        ports = ["--port", str(self._port), "--webui-port", str(free_port())]
        self._launch("org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", *ports)
        self._wait_for("I have been elected leader", 1)
        for number in range(2):
            home = self._folder / f"worker{number}"
            home.mkdir()
            room = ["--cores", "1", "--memory", "1g", "--host", "127.0.0.1", "--work-dir", str(home)]
            self._launch(
                "org.apache.spark.deploy.worker.Worker", *room, "--webui-port", str(free_port()), self.url, cwd=home
            )
        self._wait_for("Registering worker", 2)

    def _launch(self, main: str, *args: str, cwd: Path | None = None) -> None:
        import pyspark

        home = Path(pyspark.__file__).parent
        environment = {
            **os.environ,
            "JAVA_HOME": self._java,
            "SPARK_HOME": str(home),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        java = [str(home / "bin" / "spark-class"), main, *args]
        self._processes.append(
            subprocess.Popen(java, stdout=self._out, stderr=self._out, env=environment, cwd=cwd or self._folder)
        )

    def _wait_for(self, words: str, times: int) -> None:
        end = time.monotonic() + WORD_SECONDS
        while self._said().count(words) < times:
            assert time.monotonic() < end, f"the cluster does not start:\n{self._said()[-4000:]}"
            time.sleep(0.1)

    def _said(self) -> str:
        return (self._folder / "cluster.out").read_text(errors="replace")

    def executors(self) -> list[int]:
        """Return the pids of the executors' JVMs."""
        found = [pid for process in self._processes for pid in children(process.pid)]
        return [pid for pid in found if "CoarseGrainedExecutorBackend" in command_of(pid)]

    def close(self) -> None:
        """Kill everything that still runs."""
        for process in self._processes:
            kill(*children(process.pid), process.pid)
            process.wait(60)
        self._out.close()
