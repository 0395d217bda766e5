"""SIGTERM and SIGINT end a served process cleanly, with open requests answered first."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

PROGRAM = """
import asyncio, sys, threading
sys.path.insert(0, sys.argv[1])
from serving import NoDatabases
from headwater.config import ServeConfig
from headwater.serve.api import Api
from headwater.serve.server import Server, loop_factory

class Slow(NoDatabases):
    def names(self):
        print("entered", flush=True)
        sys.stdin.readline()
        return ["late"]

server = Server(ServeConfig(http="127.0.0.1:0", drain_seconds=20.0), Api.over(Slow()))
with asyncio.Runner(loop_factory=loop_factory()) as runner:
    runner.run(server.serve(started=lambda: print(server.url, flush=True)))
print("stopped", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_the_process(number: int) -> None:
    here = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, here], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        url = process.stdout.readline().strip()
        body = {"id": 1, "method": "schema.list_databases"}
        got: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: got.append(httpx.post(url + "/api/v1/rpc", json=body, timeout=20)))
        asking.start()
        assert process.stdout.readline() == "entered\n"
        os.kill(process.pid, number)
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "stopped\n"
        asking.join(20)
        assert process.wait(20) == 0
    assert got[0].json()["result"] == {"databases": ["late"]}
