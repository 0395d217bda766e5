"""A client of the JSON gateway: sends messages, and separates answers from events."""

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
    """An open connection to the gateway, to be closed with `close`."""

    def __init__(self, url: str, *, headers: dict[str, Any] | None = None, query: str = "", **more: Any) -> None:
        self._open = contextlib.ExitStack()
        self._numbers = count(1)
        self._events: list[dict[str, Any]] = []
        self.socket = self._open.enter_context(web_socket(url, f"/api/v1/ws{query}", headers or {}, **more))

    def send(self, type: str, payload: Any = None, id: Any = None) -> Any:
        """Send a message; return the id that its answer will have."""
        id = f"req-{next(self._numbers)}" if id is None else id
        body = {"id": id, "type": type} if payload is None else {"id": id, "type": type, "payload": payload}
        self.socket.send(json.dumps(body))
        return id

    def frame(self, patience: float = PATIENCE) -> dict[str, Any]:
        """Return the next frame."""
        found = json.loads(self.socket.recv(timeout=patience))
        assert list(found) == ["id", "type", "payload"], found
        assert found["type"] in ("result", "error", "event", "pong"), found
        return found

    def answer(self) -> dict[str, Any]:
        """Return the next frame that is no event; keep the events before it."""
        while (found := self.frame())["type"] == "event":
            self._events.append(found)
        return found

    def ask(self, type: str, payload: Any = None, id: Any = None) -> dict[str, Any]:
        """Send a message and return its answer."""
        asked = self.send(type, payload, id)
        found = self.answer()
        assert found["id"] == asked, found
        return found

    def ok(self, type: str, payload: Any = None, id: Any = None) -> dict[str, Any]:
        """Return the payload of the answer; fail if it is an error."""
        found = self.ask(type, payload, id)
        assert found["type"] in ("result", "pong"), found
        return found["payload"]

    def error(self, type: str, payload: Any = None, id: Any = None) -> dict[str, Any]:
        """Return the error payload of the answer; fail if there is none."""
        found = self.ask(type, payload, id)
        assert found["type"] == "error", found
        assert set(found["payload"]) <= {"message", "code", "details"}
        return found["payload"]

    def events(self, number: int) -> list[dict[str, Any]]:
        """Return the next `number` events."""
        while len(self._events) < number:
            found = self.frame()
            assert found["type"] == "event", found
            self._events.append(found)
        taken, self._events = self._events[:number], self._events[number:]
        return taken

    def closed(self) -> tuple[int | None, str | None]:
        """Wait for the close of the socket, skipping frames; return code and reason."""
        deadline = time.monotonic() + PATIENCE
        with contextlib.suppress(ConnectionClosed):
            while True:
                self.socket.recv(timeout=deadline - time.monotonic())
        return self.socket.close_code, self.socket.close_reason

    def close(self) -> None:
        """Close the connection."""
        self._open.close()
