"""A client of the JSON gateway: sends messages, and keeps answers and events apart."""

from __future__ import annotations

import contextlib
import json
import time
from itertools import count
from typing import Any

from tests.conformance.readers import web_socket
from tests.suite.deadlines import PATIENCE
from websockets.exceptions import ConnectionClosed


class GatewayClient:
    """Open at once; `close` it."""

    def __init__(self, url: str, *, headers: dict[str, Any] | None = None, query: str = "", **more: Any) -> None:
        self._open = contextlib.ExitStack()
        self._numbers = count(1)
        self._events: list[dict[str, Any]] = []
        self.socket = self._open.enter_context(web_socket(url, f"/api/v1/ws{query}", headers or {}, **more))

    def send(self, type: str, payload: Any = None, id: Any = None) -> Any:
        """Ask; the id under which the answer comes."""
        id = f"req-{next(self._numbers)}" if id is None else id
        body = {"id": id, "type": type} if payload is None else {"id": id, "type": type, "payload": payload}
        self.socket.send(json.dumps(body))
        return id

    def frame(self, patience: float = PATIENCE) -> dict[str, Any]:
        """Whatever comes next."""
        found = json.loads(self.socket.recv(timeout=patience))
        assert list(found) == ["id", "type", "payload"], found
        assert found["type"] in ("result", "error", "event", "pong"), found
        return found

    def answer(self) -> dict[str, Any]:
        """The next frame that is no event; events meanwhile are kept."""
        while (found := self.frame())["type"] == "event":
            self._events.append(found)
        return found

    def ask(self, type: str, payload: Any = None, id: Any = None) -> dict[str, Any]:
        """One message and its answer."""
        asked = self.send(type, payload, id)
        found = self.answer()
        assert found["id"] == asked, found
        return found

    def ok(self, type: str, payload: Any = None, id: Any = None) -> dict[str, Any]:
        """The payload of the answer, which must not be an error."""
        found = self.ask(type, payload, id)
        assert found["type"] in ("result", "pong"), found
        return found["payload"]

    def error(self, type: str, payload: Any = None, id: Any = None) -> dict[str, Any]:
        """The error, which must be there, with its code and remedy."""
        found = self.ask(type, payload, id)
        assert found["type"] == "error", found
        assert set(found["payload"]) <= {"message", "code", "details"}
        return found["payload"]

    def events(self, number: int) -> list[dict[str, Any]]:
        """The next events, whole."""
        while len(self._events) < number:
            found = self.frame()
            assert found["type"] == "event", found
            self._events.append(found)
        taken, self._events = self._events[:number], self._events[number:]
        return taken

    def closed(self) -> tuple[int | None, str | None]:
        """Code and reason, which must come; frames before are passed over."""
        deadline = time.monotonic() + PATIENCE
        with contextlib.suppress(ConnectionClosed):
            while True:
                self.socket.recv(timeout=deadline - time.monotonic())
        return self.socket.close_code, self.socket.close_reason

    def close(self) -> None:
        """Leave."""
        self._open.close()
