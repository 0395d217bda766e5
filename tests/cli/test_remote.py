"""Requests over a connection that the server has closed meanwhile."""

import socket
import threading

from tests.suite.deadlines import PATIENCE

from headwater.cli.remote import Remote

ANSWER = b'{"ok": true, "result": 7}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)


def test_connection_closed_by_the_server_is_reopened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = threading.Semaphore(0)

        def serve() -> None:
            """Answer once on each connection, then close it without notice, as after a long idle time."""
            for _ in range(3):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65_536)
                    connection.sendall(HEAD + ANSWER)
                closed.release()

        thread = threading.Thread(target=serve)
        thread.start()
        remote = Remote(f"http://127.0.0.1:{listener.getsockname()[1]}")
        for _ in range(3):
            assert remote.call("x") == 7
            assert closed.acquire(timeout=PATIENCE)
        remote.close()
        thread.join(PATIENCE)
