"""SIGTERM and SIGINT end a served process cleanly, with open requests answered first; a second one does not wait."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.suite.deadlines import PATIENCE

PROGRAM = """
import asyncio, sys, threading
sys.path.insert(0, sys.argv[1])
from tests.serve.server_fixture import NoDatabases
from headwater.config import ServeConfig
from headwater.serve.api import Api
from headwater.serve.server.server import Server, loop_factory

class Slow(NoDatabases):
    def names(self):
        print("entered", flush=True)
        sys.stdin.readline()
        return ["late"]

server = Server(ServeConfig(http="127.0.0.1:0", drain_seconds=float(sys.argv[2])), Api.over(Slow()))
with asyncio.Runner(loop_factory=loop_factory()) as runner:
    runner.run(server.serve(started=lambda: print(server.url, server.grpc_address, flush=True)))
print("stopped", flush=True)
"""


@contextlib.contextmanager
def program(*args: str) -> Iterator[subprocess.Popen[str]]:
    """Yield the process of PROGRAM; kill it at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_or_sigint_finishes_the_open_request_and_exits_with_0(number: int) -> None:
    here = str(Path(__file__).parents[3])
    with program(here, "20") as process:
        assert process.stdin and process.stdout
        url, _ = process.stdout.readline().split()
        body = {"id": 1, "method": "schema.list_databases"}
        got: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: got.append(httpx.post(url + "/api/v1/rpc", json=body, timeout=PATIENCE))
        )
        asking.start()
        assert process.stdout.readline() == "entered\n"
        os.kill(process.pid, number)
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "stopped\n"
        asking.join(PATIENCE)
        assert process.wait(PATIENCE) == 0
    assert got[0].json()["result"] == {"databases": ["late"]}


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)])
@pytest.mark.parametrize("draining", [True, False])
def test_second_signal_stops_the_server_without_waiting_for_open_grpc_calls(
    numbers: tuple[int, int], draining: bool
) -> None:
    here, go_on = str(Path(__file__).parents[3]), threading.Event()

    def asking() -> Iterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        go_on.wait(60)  # a call that its client does not end

    with program(here, "600") as process:
        assert process.stdout
        url, address = process.stdout.readline().split()
        with grpc.insecure_channel(address) as channel:
            answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asking())
            assert next(answers).HasField("list_services_response")
            os.kill(process.pid, numbers[0])
            while draining and is_open(url):
                pass
            os.kill(process.pid, numbers[1])
            try:
                assert process.stdout.readline() == "stopped\n"
            finally:
                go_on.set()
            with pytest.raises(grpc.RpcError):
                next(answers)
        assert process.wait(PATIENCE) == 0


def is_open(url: str) -> bool:
    try:
        return httpx.get(url + "/healthz").status_code == 200
    except httpx.TransportError:
        return False
