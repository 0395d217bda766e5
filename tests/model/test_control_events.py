"""Control events are listed once; the JavaScript client has the same ones."""

import ast
from pathlib import Path

from tests.suite.stream_events_js import FILE, source

import headwater
from headwater.model.control_events import LAST_EVENTS, ROW_EVENTS, ControlEvent

SOURCES = Path(headwater.__file__).parent
STREAM_CODE = (
    "feeds/deliver/stream.py",
    "client/sse.py",
    "cli/commands/tail.py",
    "serve/gateway/messages.py",
    "serve/http/handlers/table_snapshots.py",
)


def test_javascript_constants_equal_the_generated_text() -> None:
    assert FILE.read_text() == source(), "run `make stream-events`"


def test_last_events_and_row_events_are_control_events() -> None:
    assert set(ControlEvent) > LAST_EVENTS and set(ControlEvent) > ROW_EVENTS


def test_stream_modules_compare_control_events_and_no_event_texts() -> None:
    for name in STREAM_CODE:
        spelled = {
            node.value
            for node in ast.walk(ast.parse((SOURCES / name).read_text()))
            if isinstance(node, ast.Compare | ast.MatchValue | ast.Set)
            for node in ast.iter_child_nodes(node)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert spelled.isdisjoint(ControlEvent), name
