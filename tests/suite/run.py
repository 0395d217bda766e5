"""Run the whole suite in parts that go on side by side, and report each: `python -m tests.suite.run [ROOM …]`.

A part is a command with its output in a file of its own under `.test-output/`, printed when the part ends. While the
parts run, a line a minute says how far each is. Files of the part `tests` are in memory where the machine has enough:
much of that part's time is waiting for the disk.
"""

import argparse
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from tests.suite.seeds import VARIABLE
from tests.suite.time_report import outcomes, slowest

ROOT = Path(__file__).parent.parent.parent
OUTPUT = ROOT / ".test-output"
WORKERS = int(os.environ.get("WORKERS", "3"))  # processes of the part `tests`: much of its time is waiting
SPARK_WORKERS = int(os.environ.get("SPARK_WORKERS", "1"))  # each with a Java of its own
SPARK_ROOMS = (
    "tests/pipeline",
    "tests/guarantees",
    "tests/cli",
)  # those with tests that need Spark
MEMORY = Path("/dev/shm")
MEMORY_INFO = Path("/proc/meminfo")
MIN_SPACE = 4 << 30  # bytes free in MEMORY
MIN_AVAILABLE = 8 << 30  # bytes of memory available
NO_TESTS = 5  # pytest's exit status
TICK = 60.0  # seconds between two lines of progress
PROGRESS = re.compile(r"\[ *(\d+%)\]")
FAILED = re.compile(r"^(?:FAILED|ERROR) .*", re.MULTILINE)
COUNTS = re.compile(r"^(?:\S*\d+ (?:passed|failed|skipped|deselected|xfailed|errors?|warnings?)\b.*)$", re.MULTILINE)


class Part(msgspec.Struct):
    """A command of the suite."""

    name: str
    command: Sequence[str]
    may_be_empty: bool = False  # a room may have no test of this kind
    env: Mapping[str, str] = {}  # variables besides those of this process

    @property
    def log(self) -> Path:
        return OUTPUT / f"{self.name}.log"

    @property
    def timings(self) -> Path:
        return OUTPUT / f"{self.name}.json"


class MemoryFolder:
    """A folder in memory for the files of tests; `path` is None where the machine has too little memory."""

    def __init__(self) -> None:
        self.path = MEMORY / f"headwater-tests-{os.getpid()}" if _has_memory() else None
        if self.path is not None:
            for old in MEMORY.glob("headwater-tests-*"):
                if not Path("/proc", old.name.rpartition("-")[2]).exists():
                    shutil.rmtree(old, ignore_errors=True)
            self.path.mkdir(exist_ok=True)
            self.path.chmod(0o1777)  # database servers run as other users

    def env(self) -> dict[str, str]:
        """Return the variables that put temporary files into the folder."""
        return {} if self.path is None else {"TMPDIR": str(self.path)}

    def remove(self, *, passed: bool) -> str:
        """Remove the folder, or return where the files of failed tests are; the next run removes them."""
        if self.path is None:
            return ""
        if passed:
            shutil.rmtree(self.path, ignore_errors=True)
        return "" if passed else f"files of failed tests: {self.path}"


def _has_memory() -> bool:
    """Return whether MEMORY has space, the machine has memory for it, and programs may be run from it."""
    if not (MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and MEMORY_INFO.exists()):
        return False
    found, available = os.statvfs(MEMORY), re.search(r"MemAvailable: *(\d+) kB", MEMORY_INFO.read_text())
    has_space = found.f_bavail * found.f_frsize >= MIN_SPACE and not found.f_flag & os.ST_NOEXEC
    return has_space and available is not None and int(available[1]) << 10 >= MIN_AVAILABLE


def parts(rooms: Sequence[str] = (), *, fast: bool = False, env: Mapping[str, str] = {}) -> list[Part]:
    """Return the parts: everything, only the tests of some rooms, or only what `make check` runs.

    `env` has variables for the part `tests`.
    """
    paths = [f"tests/{room}" for room in rooms]
    if fast:
        found = [_tests("tests", "not slow and not spark and not soak", paths, WORKERS)]
    else:
        found = [
            _tests("spark", "spark and not soak", paths or SPARK_ROOMS, SPARK_WORKERS),
            _tests("tests", "not spark and not soak", paths, WORKERS),
        ]
    found[-1].env = env
    if not rooms:
        found += [Part(name, ["make", "--no-print-directory", name]) for name in ("lint", "types")]
    return found


def _tests(name: str, marks: str, paths: Sequence[str], workers: int) -> Part:
    part = Part(name, [], may_be_empty=bool(paths) and paths is not SPARK_ROOMS)
    spread = ["--dist", "worksteal", "-n", str(workers)]
    part.command = [sys.executable, "-m", "pytest", "-m", marks, "-rfEs", f"--timings={part.timings}", *spread, *paths]
    return part


class Running:
    """A part that was started."""

    def __init__(self, part: Part) -> None:
        self.part, self._began, self.seconds = part, time.monotonic(), 0.0
        with part.log.open("wb") as out:
            self._process = subprocess.Popen(
                part.command,
                cwd=ROOT,
                env={**os.environ, **part.env},
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
            )

    def is_over(self) -> bool:
        """Return whether the part has ended; note when."""
        if self._process.poll() is None:
            return False
        self.seconds = self.seconds or time.monotonic() - self._began
        return True

    @property
    def passed(self) -> bool:
        return self._process.returncode == 0 or (self._process.returncode == NO_TESTS and self.part.may_be_empty)

    @property
    def text(self) -> str:
        return self.part.log.read_text(errors="replace")

    def progress(self) -> str:
        found = PROGRESS.findall(self.text)
        return f"{self.part.name} {found[-1] if found else '…'}"

    def summary(self) -> str:
        counts = COUNTS.findall(self.text)
        verdict = "ok" if self.passed else "FAILED"
        return f"{self.part.name:8}{verdict:8}{clock(self.seconds):>8}   {counts[-1] if counts else ''}".rstrip()

    def stop(self) -> None:
        """End a part that is still running."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def clock(seconds: float) -> str:
    """Return minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def wait(running: Sequence[Running]) -> None:
    """Print each part when it ends, and every minute how far the others are."""
    left, began, told = list(running), time.monotonic(), time.monotonic()
    while left:
        for part in [part for part in left if part.is_over()]:
            left.remove(part)
            print(f"=== {part.part.name}\n{part.text.rstrip()}\n", flush=True)
        if left and time.monotonic() > told + TICK:
            told = time.monotonic()
            print(f"{clock(told - began)}  {', '.join(part.progress() for part in left)}", flush=True)
        time.sleep(0.2)


class Cores:
    """Measures how busy the machine's cores are from its creation on; only on Linux."""

    def __init__(self) -> None:
        self._before = self._now()

    def __str__(self) -> str:
        spent = [now - before for before, now in zip(self._before, self._now(), strict=True)]
        if not (whole := sum(spent)):
            return ""
        user, nice, system, idle, waiting, *_, stolen = (100 * each / whole for each in spent)
        return f"cores: {user + nice + system:.0f} % busy, {idle + waiting:.0f} % idle, {stolen:.0f} % taken by others"

    @staticmethod
    def _now() -> list[int]:
        stat = Path("/proc/stat")
        return [int(each) for each in stat.read_text().split(maxsplit=9)[1:9]] if stat.exists() else []


def report(running: Sequence[Running], seconds: float, cores: str = "") -> Iterable[str]:
    """Yield the time of each part, the slowest tests and what failed."""
    yield "=== parts"
    for part in running:
        yield part.summary()
    yield f"{'all':16}{clock(seconds):>8}{f'   {cores}' if cores else ''}\n\n=== the ten slowest tests"
    timings = [part.part.timings for part in running if part.part.timings.exists()]
    yield from slowest(timings, 10)
    failed = [line for part in running for line in FAILED.findall(part.text)]
    if failed:
        yield "\n=== failed"
        yield from failed
    counts = outcomes(timings)
    yield "\n" + ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped"))


def main(arguments: Sequence[str]) -> int:
    """Run the requested parts, by default all; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="*", help="folders of tests/ to run; default: everything, with lint and types")
    parser.add_argument("--fast", action="store_true", help="only the fast tests, with lint and types")
    asked = parser.parse_args(arguments)
    OUTPUT.mkdir(exist_ok=True)
    for old in OUTPUT.iterdir():
        old.unlink()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the parts would outlive us
    print(f"random tests: {VARIABLE}={os.environ.setdefault(VARIABLE, secrets.token_hex(4))}", flush=True)
    began, cores = time.monotonic(), Cores()
    running: list[Running] = []
    memory = MemoryFolder()
    try:
        running += map(Running, parts(asked.rooms, fast=asked.fast, env=memory.env()))
        wait(running)
    finally:
        for part in running:
            part.stop()
        left = memory.remove(passed=all(part.passed for part in running))
    print(f"random tests: {VARIABLE}={os.environ[VARIABLE]}")
    for line in report(running, time.monotonic() - began, str(cores)):
        print(line)
    if left:
        print(left)
    return 0 if all(part.passed for part in running) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
