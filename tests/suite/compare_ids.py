"""Compare the test ids of two runs: nothing may disappear but by name.

    python -m pytest --collect-only -q -o addopts= > before.txt      (and the same later: after.txt)
    python -m tests.suite.compare_ids before.txt after.txt

With `-m "not soak"` in both, tests that moved from `make test` to `make soak` are missing too. Exit status 1 if an id
of `before` is missing in `after`.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path


def ids_of(path: Path) -> set[str]:
    """Return the test ids that `pytest --collect-only -q` listed."""
    return {line for line in path.read_text().splitlines() if "::" in line}


def test_of(node: str) -> str:
    """Return a test id without its parameters."""
    return node.partition("[")[0]


def report(before: set[str], after: set[str]) -> Iterable[str]:
    """Yield what went and what is new: whole tests first, then tests with fewer or more parameters."""
    yield f"{len(before)} ids before, {len(after)} after"
    counts = [Counter(map(test_of, ids)) for ids in (before, after)]
    for test in sorted(counts[0].keys() | counts[1].keys()):
        was, now = (count[test] for count in counts)
        gone = [node for node in before - after if test_of(node) == test]
        if not now:
            yield f"gone     {test} ({was})"
        elif not was:
            yield f"new      {test} ({now})"
        elif gone:
            yield f"changed  {test}: {was} -> {now}, without {', '.join(sorted(gone)[:3])}"


if __name__ == "__main__":
    old, new = (ids_of(Path(name)) for name in sys.argv[1:3])
    for line in report(old, new):
        print(line)
    sys.exit(1 if old - new else 0)
