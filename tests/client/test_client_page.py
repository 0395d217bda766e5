"""The examples of docs/client.md run, in order, and print what the page shows."""

import contextlib
import io
from typing import Any

import pytest
from tests.conformance.live_server import Live
from tests.doc_pages import BLOCK, page


@pytest.mark.slow
def test_client_page_examples_print_the_documented_output(live: Live) -> None:
    names: dict[str, Any] = {}
    printed: str | None = None
    ran = 0
    try:
        for kind, body in BLOCK.findall(page("docs/client.md")):
            if kind == "python":
                assert not printed, f"the page does not show {printed!r}"
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(body.replace("http://127.0.0.1:7171", live.url), "client.md", "exec"), names)
                printed = out.getvalue()
                ran += 1
            else:
                assert (kind, body) == ("text", printed)
                printed = None
    finally:
        if "client" in names:
            names["client"].close()
    assert ran > 8 and not printed
