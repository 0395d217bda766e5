"""`headwater serve`: the server in the foreground until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli.commands.config import add_config_flags, add_databases, add_token_file, load_config
from headwater.cli.failure import OK

if TYPE_CHECKING:
    from headwater.app import App
    from headwater.serve.server.server import Server


def add(commands: Any) -> None:
    """Register `serve`."""
    parser = commands.add_parser("serve", help="capture databases and serve them", allow_abbrev=False)
    add_databases(parser)
    add_config_flags(parser)
    parser.add_argument("--http", metavar="HOST:PORT", help="where HTTP listens (127.0.0.1:7171; port 0: any)")
    parser.add_argument("--grpc", metavar="HOST:PORT", help="where gRPC listens (127.0.0.1:7172; off: nowhere)")
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate and chain in PEM: TLS on both ports")
    parser.add_argument("--tls-key", metavar="FILE", help="its key in PEM, unless it is in the same file")
    parser.add_argument("--tls-ca", metavar="FILE", help="authorities in PEM: gRPC clients must show a certificate")
    parser.add_argument("--auth", action="store_true", default=None, help="demand the credential on loopback too")
    parser.add_argument("--wal", action="store_true", default=None, help="allow turning a file into WAL mode")
    parser.add_argument("--publish-all", action="store_true", default=None, help="PostgreSQL: publish FOR ALL TABLES")
    add_token_file(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    config = load_config(
        args,
        serve__http=args.http,
        serve__grpc=args.grpc,
        serve__auth=args.auth,
        serve__tls_cert=args.tls_cert,
        serve__tls_key=args.tls_key,
        serve__tls_ca=args.tls_ca,
        sqlite__wal=args.wal,
        postgres__publish_all=args.publish_all,
    )
    import asyncio

    from headwater.app import App
    from headwater.model.work.sqlite_memory import return_freed_memory
    from headwater.serve.api import Api
    from headwater.serve.server.server import Server, loop_factory

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return_freed_memory()
    app = App(config)
    # First of all: it refuses an open door.
    server = Server(config.serve, Api.over(app), app.open_feeds, Path(config.data))
    server.bind()  # a taken port must not cost anybody's history
    try:
        app.start()
        _calm_collector()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(server.serve(started=lambda: _announce(server, app)))
    finally:
        server.unbind()
        app.close()
    print("headwater stopped", flush=True)
    return OK


def _announce(server: Server, app: App) -> None:
    """Print the line that scripts wait for: the databases are captured, and requests are answered."""
    grpc = f" grpc {server.grpc_address}" if server.grpc_addresses else ""
    full = " read-only: the disk is full" if app.is_storage_full else ""
    print(f"headwater ready at {server.url}{grpc} databases {','.join(app.names())}{full}", flush=True)


def _calm_collector() -> None:
    """Exclude loaded objects from garbage collection, and collect less often."""
    import gc

    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
