"""The JavaScript client without a browser: its own tests, and patches that the server's code made."""

import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater.model.literal import U64, Json
from headwater.queries.patch.patch import Answer, diff

CLIENT = Path(__file__).parents[2] / "clients" / "js"
MISSING = (
    "NO NODE, so the tests of clients/js did not run: install Node 20 or newer (Debian, Ubuntu: apt-get install nodejs)"
)
COLUMNS = ({"name": "id"}, {"name": "ä"})
VALUES = [
    None,
    0,
    1,
    1.0,
    -0.0,
    1e16,
    1.5e-7,
    True,
    "a",
    '\u2028"\\]',
    "é😀\uffff",
    b"\0",
    2**62 + 1,
    U64(2**64 - 1),
    Json("[1]"),
]


@pytest.fixture(scope="module")
def node() -> str:
    found = shutil.which("node")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    return found


def run(command: list[str], **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=CLIENT, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_js_client_own_tests_pass(node: str) -> None:
    out = run([node, "--test", "--test-reporter=tap", *map(str, sorted(CLIENT.glob("test/*.test.js")))])
    assert "\n# fail 0\n" in out and "\n# pass 0\n" not in out, out[-3000:]


def test_js_client_has_no_dependencies() -> None:
    package = json.loads((CLIENT / "package.json").read_text())
    assert not {name for name in package if "ependencies" in name} and package["license"] == "Apache-2.0"
    for path in (CLIENT / "src").glob("*.js"):
        lines = [
            line for line in path.read_text().splitlines() if " from " in line and line.startswith(("import", "export"))
        ]
        assert all('from "./' in line for line in lines), f"{path.name} imports from elsewhere"


def some_rows(rng: random.Random) -> list[tuple[Any, ...]]:
    keys = rng.sample([*range(20), 2**60 + 1, 2**60 + 2, "1", 1.5, b"1"], rng.randrange(15))
    return [(key, rng.choice(VALUES)) for key in keys]


def case(rng: random.Random) -> dict[str, str]:
    old = some_rows(rng)
    new = some_rows(rng) if rng.random() < 0.5 else [*old[3:], *old[:1]]
    ordered = rng.random() < 0.8
    base = Answer.of('"p.1"', COLUMNS, old, key=(0,), ordered=ordered)
    fresh = Answer.of('"p.2"', COLUMNS, new, key=(0,), ordered=ordered, like=base)
    patch = diff(base, fresh)
    wanted = fresh.rows_text if ordered else _in_its_order(patch, base)
    return {
        "columns": msgspec.json.encode(COLUMNS).decode(),
        "etag": base.tag,
        "base": base.rows_text.decode(),
        "patch": msgspec.json.encode(patch).decode(),
        "wanted": wanted.decode(),
    }


def _in_its_order(patch: Any, base: Answer) -> bytes:
    from tests.queries.patch.patch_application import apply

    return b"[%s]" % b",".join(apply(msgspec.json.encode(patch), base.texts))


def test_server_patches_applied_by_the_js_client_produce_the_expected_rows(node: str, fresh_seed: str) -> None:
    rng = random.Random(fresh_seed)
    cases = [json.dumps(case(rng)) for _ in range(500)]
    out = run([node, str(CLIENT / "test" / "apply_cases.js")], input="\n".join(cases))
    assert int(out) == 500
