"""A real server at a fixed port, and a real cache in front of it."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.caches.proxy_processes import FRONTS, Front, free_port, program
from tests.guarantees.server_process import ServerProcess

PUBLIC = "[queries]\npublic = true\n"


@pytest.fixture
def place() -> Iterator[Path]:
    """Yield a folder with a short path, because socket paths are limited."""
    folder = Path(tempfile.mkdtemp(prefix="hw-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def serve(place: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Return `serve(settings)`, which starts a server."""
    made: list[ServerProcess] = []

    def start(settings: str = PUBLIC) -> ServerProcess:
        server = ServerProcess(place / "data", settings, http=f"127.0.0.1:{free_port()}")
        made.append(server)
        server.start()
        return server

    yield start
    for server in made:
        server.close()


@pytest.fixture(params=FRONTS)
def front(request: pytest.FixtureRequest, place: Path) -> Iterator[Callable[[ServerProcess], Front]]:
    """Return `front(server)`, which starts nginx or Varnish."""
    name, make = FRONTS[request.param]
    if program(name) is None:
        missing = f"NO {name}, so nothing was tried through it: `make services`, or install {request.param}"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    made: list[Front] = []

    def start(server: ServerProcess) -> Front:
        made.append(make(place / request.param, int(server.url.rpartition(":")[2])))
        return made[-1]

    yield start
    for one in made:
        one.close()
