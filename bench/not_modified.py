"""Rate of 304 answers on a prepared query, whose head is checked each time, against nginx with a static file."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import jwt

from bench.generator import Missing
from bench.peers import free_port, running
from bench.sides import folder, server, versions
from headwater.client import Client

BAR, KEY_BAR = 0.2, 0.15  # of nginx, without and with a credential
ROWS = 100
SECRET = "signs the tokens of this benchmark only"
CONNECTIONS = 16
NGINX = """
{user}
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  keepalive_requests 1000000000;
  open_file_cache max=100 inactive=1h;
  open_file_cache_valid 1h;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{ listen 127.0.0.1:{port}; root {folder}/www; etag on; }}
}}
"""


@contextlib.contextmanager
def nginx(place: Path, body: bytes) -> Iterator[str]:
    """Run a private nginx that serves `body`; yield its URL."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if not program:
        raise Missing("no nginx (apt-get install nginx)")
    www, port = place / "www", free_port()
    user = "user root;" if os.geteuid() == 0 else ""  # else its worker could not enter our folder
    www.mkdir()
    (www / "answer.json").write_bytes(body)
    config = place / "nginx.conf"
    config.write_text(NGINX.format(folder=place, port=port, user=user))
    with running([program, "-p", str(place), "-c", str(config), "-e", str(place / "error.log")], port):
        yield f"http://127.0.0.1:{port}/answer.json"


def prepared(url: str, token: str = "") -> str:
    """Create a small table and prepare a query of it; return the URL of the query."""
    with Client(url, token=token or None) as client:
        client.call("sql.exec", sql="CREATE TABLE IF NOT EXISTS t(id INTEGER PRIMARY KEY, v TEXT)")
        for number in range(ROWS):
            client.call("sql.exec", sql="INSERT OR REPLACE INTO t VALUES (?, 'some value of a row')", args=[number])
        query = client.call("query.prepare", sql="SELECT id, v FROM t WHERE id < ? ORDER BY id")
    return f"{url}/api/v1/q/{query['query_id']}?args=[{ROWS}]"


def credentials(url: str, token: str) -> dict[str, dict[str, str]]:
    """Return headers with each kind of credential, by its name."""
    with Client(url, token=token) as client:
        key = client.call("security.token.create", name="bench", role="viewer")["token"]
    signed = jwt.encode({"sub": "bench", "role": "viewer", "exp": int(time.time()) + 86_400}, SECRET, "HS256")
    return {
        "token": {"x-api-key": token},
        "API key": {"x-api-key": key},
        "JWT": {"authorization": f"Bearer {signed}"},
    }


def fetched(url: str, headers: dict[str, str]) -> tuple[str, bytes]:
    """Return the tag and body of an answer."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
        return answer.headers["ETag"], answer.read()


def rate(url: str, headers: dict[str, str], seconds: float) -> float:
    """Return how many requests a second are answered by 304; raise RuntimeError if any answer is another."""
    program = shutil.which("wrk")
    if not program:
        raise Missing("no wrk (apt-get install wrk)")
    flags = [flag for name, value in headers.items() for flag in ("-H", f"{name}: {value}")]
    command = [program, "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", *flags, url]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in said or float(re.search(r"Transfer/sec:\s+([\d.]+)", said)[1]) == 0:  # type: ignore[index]
        raise RuntimeError(f"not all answers were 304:\n{said}")
    return float(re.search(r"Requests/sec:\s+([\d.]+)", said)[1])  # type: ignore[index]


def main(repeats: int = 5, seconds: int = 3) -> None:
    """Print medians and ratios."""
    print(versions())
    print(f"not_modified: 304/s of {ROWS} rows, {CONNECTIONS} connections (bars: {BAR}, with a key {KEY_BAR} of nginx)")
    with folder() as place, contextlib.ExitStack() as stack:
        os.environ |= {"HEADWATER_TOKEN": "bench-token", "HEADWATER_SERVE_JWT_SECRET": SECRET}
        locked, _ = stack.enter_context(server(place / "locked"))
        del os.environ["HEADWATER_TOKEN"], os.environ["HEADWATER_SERVE_JWT_SECRET"]
        free, _ = stack.enter_context(server(place / "free"))
        asked_by, query = credentials(locked, "bench-token"), prepared(locked, "bench-token")
        own: dict[str, tuple[str, dict[str, str]]] = {"ours": (prepared(free), {})}
        own |= {f"ours, {kind}": (query, headers) for kind, headers in asked_by.items()}
        _, body = fetched(own["ours"][0], {})
        sides = {"nginx": (stack.enter_context(nginx(place, body)), {}), **own}
        asked = {
            name: (url, {**headers, "If-None-Match": fetched(url, headers)[0]})
            for name, (url, headers) in sides.items()
        }
        for url, headers in asked.values():
            rate(url, headers, 1)
        found: dict[str, list[float]] = {name: [] for name in asked}
        for _ in range(repeats):
            for name, (url, headers) in asked.items():
                found[name].append(rate(url, headers, seconds))
    base = statistics.median(found["nginx"])
    for name, rates in found.items():
        ratio = statistics.median(rates) / base
        bar = {"ours": BAR, "ours, API key": KEY_BAR}.get(name)
        missed = "" if bar is None or ratio >= bar else "   missed"
        print(f"  {name:14} {statistics.median(rates):>9,.0f}/s   {ratio:.2f}x{missed}")


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:]))
