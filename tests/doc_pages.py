"""Pages of the documentation as tests read them: prose, code blocks, tables."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
METHOD_PAGES = ["docs/http-api.md", "docs/queries.md", "docs/query-feeds.md", "docs/subscriptions.md"]
EXAMPLE_PAGES = [*METHOD_PAGES, "docs/streams.md", "docs/gateway.md"]
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def prose(text: str) -> str:
    """Return the page without its code blocks."""
    return BLOCK.sub("", text)


def blocks(text: str, kind: str) -> list[tuple[str, str]]:
    """Return the blocks whose first word is `kind`: the rest of that line, and the content."""
    found = [(info.split(" ", 1), body) for info, body in BLOCK.findall(text)]
    return [(" ".join(info[1:]), body) for info, body in found if info[0] == kind]


def table(text: str, *headers: str) -> list[list[str]]:
    """Return the rows of the one table with these headers."""
    lines = iter(prose(text).splitlines())
    head = "| " + " | ".join(headers) + " |"
    assert sum(line == head for line in prose(text).splitlines()) == 1, f"no table {head}"
    rows = itertools.takewhile(lambda line: line.startswith("|"), itertools.islice(_after(lines, head), 1, None))
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def _after(lines: Iterator[str], head: str) -> Iterator[str]:
    for line in lines:
        if line == head:
            return lines
    return iter(())


def literals(text: str) -> list[str]:
    """Return everything set as `code` in the prose."""
    return re.findall(r"`([^`\n]+)`", prose(text))


def code(name: str) -> str:
    return f"`{name}`"
