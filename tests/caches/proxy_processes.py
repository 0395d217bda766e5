"""nginx and Varnish as separate processes, with the settings that docs/caching.md shows."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.suite.deadlines import PATIENCE

PAGE = Path(__file__).parents[2] / "docs" / "caching.md"
PORTS = range(20_000, 30_000)  # below those that the system hands out by itself

NGINX = """
daemon off;
{user}
pid {folder}/nginx.pid;
error_log stderr warn;
worker_processes 1;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    gzip on;
    gzip_proxied any;
    gzip_min_length 1;
    gzip_types *;
{settings}
}}
"""


def snippet(kind: str) -> str:
    """Return the only code block of the page in this language."""
    found = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == 1, kind
    return str(found[0])


def put(text: str, places: dict[str, str]) -> str:
    """Replace the addresses of the page by ours; fail if one of them is missing."""
    for shown, ours in places.items():
        assert shown in text, shown
        text = text.replace(shown, ours)
    return text


def program(name: str) -> str | None:
    """Return the path of a program; server programs may be in sbin folders outside of PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def free_port() -> int:
    """Return a free port."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise AssertionError("no free port was found")


class Front:
    """A cache that listens at `url` in front of a server at `port`."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.behind, self.port = folder, port, free_port()
        folder.mkdir()
        self.url = f"http://127.0.0.1:{self.port}"
        with (folder / "said").open("wb") as said:
            self._process = subprocess.Popen(self.command(), stdout=said, stderr=said)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def command(self) -> list[str]:
        raise NotImplementedError

    def _wait(self) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            assert self._process.poll() is None and time.monotonic() < end, (self.folder / "said").read_text()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)  # knocking again at once would only keep it from starting

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)


class Nginx(Front):
    """nginx in one folder; it compresses answers, and so weakens tags, if allowed."""

    def command(self) -> list[str]:
        places = {
            "127.0.0.1:7171": f"127.0.0.1:{self.behind}",
            "127.0.0.1:8080": f"127.0.0.1:{self.port}",
            "/var/cache/nginx/headwater": f"{self.folder}/cache",
            "/run/nginx-headwater.sock": f"{self.folder}/inner.sock",
        }
        user = "user root;" if os.getuid() == 0 else ""  # the folders of a test are closed to others
        settings = put(snippet("nginx"), places)
        (self.folder / "nginx.conf").write_text(NGINX.format(user=user, folder=self.folder, settings=settings))
        return [str(program("nginx")), "-p", str(self.folder), "-c", f"{self.folder}/nginx.conf", "-e", "stderr"]


class Varnish(Front):
    """varnishd in one folder, with its cache in memory."""

    def command(self) -> list[str]:
        (self.folder / "front.vcl").write_text(put(snippet("vcl"), {'"7171"': f'"{self.behind}"'}))
        command = f"-F -n {self.folder}/work -a 127.0.0.1:{self.port} -f {self.folder}/front.vcl -s malloc,64m -T none"
        at_once = "backend_remote_error_holddown=0"  # else a server that is back within 250 ms counts as down
        return [str(program("varnishd")), *command.split(), "-j", "none", "-p", "thread_pool_min=10", "-p", at_once]


FRONTS: dict[str, tuple[str, Callable[[Path, int], Front]]] = {
    "nginx": ("nginx", Nginx),
    "varnish": ("varnishd", Varnish),
}
