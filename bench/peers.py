"""The peers of the live feeds: private instances of nginx with nchan and of Redis, one worker each, on loopback."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from bench.generator import MARK, Missing, Shot, http_post, open_stream

NCHAN_MODULE = Path("/usr/lib/nginx/modules/ngx_nchan_module.so")
NCHAN = """
load_module {module};
daemon off;
worker_processes 1;
worker_rlimit_nofile 20000;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 15000; }}
http {{
  access_log off;
  keepalive_requests 1000000000;
  keepalive_timeout 1h;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location = /publish {{ nchan_publisher http; nchan_channel_id bench; nchan_message_buffer_length 1000; }}
    location = /stream {{
      nchan_subscriber eventsource websocket;
      nchan_channel_id bench;
      nchan_subscriber_first_message newest;
    }}
  }}
}}
"""


class Nchan:
    """nginx with nchan: SSE and WebSocket with message ids and a history, publishing by POST."""

    def __init__(self, port: int, pids: list[int], size: int) -> None:
        self.port, self.pids, self._size = port, pids, size

    def subscribers(self, transport: str, count: int) -> list[bytes]:
        return [open_stream(self.port, "/stream", transport)] * count

    def shot(self, width: int) -> Shot:
        """Return `width` pipelined requests, sent in one write."""
        return Shot((http_post(self.port, "/publish", MARK.ljust(self._size, "x"), "text/plain") * width,), width)


class Redis:
    """Redis publish and subscribe."""

    def __init__(self, port: int, pids: list[int], size: int) -> None:
        self.port, self.pids, self._size = port, pids, size

    def subscribers(self, transport: str, count: int) -> list[bytes]:
        return [_command("SUBSCRIBE", "bench")] * count

    def shot(self, width: int) -> Shot:
        """Return `width` pipelined commands, sent in one write."""
        return Shot((_command("PUBLISH", "bench", MARK.ljust(self._size, "x")) * width,), width)


def _command(*words: str) -> bytes:
    return f"*{len(words)}\r\n".encode() + b"".join(f"${len(word)}\r\n{word}\r\n".encode() for word in words)


@contextlib.contextmanager
def nchan(folder: Path, size: int) -> Iterator[Nchan]:
    """Run a private nginx whose events carry `size` bytes."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if not program or not NCHAN_MODULE.exists():
        raise Missing("no nginx with nchan (apt-get install nginx libnginx-mod-nchan)")
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(NCHAN.format(module=NCHAN_MODULE, folder=folder, port=port))
    command = [program, "-p", str(folder), "-c", str(config), "-e", str(folder / "error.log")]
    with running(command, port) as pid:
        yield Nchan(port, [pid, _worker(pid)], size)


@contextlib.contextmanager
def redis(folder: Path, size: int) -> Iterator[Redis]:
    """Run a private Redis without persistence whose events carry `size` bytes."""
    program = shutil.which("redis-server")
    if not program:
        raise Missing("no Redis (apt-get install redis-server)")
    port = free_port()
    command = [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--maxclients", "15000"]
    command += ["--save", "", "--appendonly", "no", "--tcp-backlog", "4096", "--logfile", str(folder / "redis.log")]
    with running(command, port) as pid:
        yield Redis(port, [pid], size)


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[int]:
    child = subprocess.Popen(command)
    try:
        _wait_until_open(child, port)
        yield child.pid
    finally:
        child.terminate()
        child.wait()


def _wait_until_open(child: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(500):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        if child.poll() is not None:
            break
        time.sleep(0.01)
    raise RuntimeError(f"{child.args!r} did not start")


def _worker(pid: int) -> int:
    """Return the pid of nginx's worker process; wait for it, because nginx opens the port first."""
    for _ in range(500):
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if found:
            return int(found[0])
        time.sleep(0.01)
    raise RuntimeError("nginx has no worker")


def free_port() -> int:
    """Return a loopback port that is free at the moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
