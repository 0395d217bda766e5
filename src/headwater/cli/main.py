"""The command `headwater`: one parser for all command groups; errors are printed as messages, not as tracebacks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from headwater import __version__
from headwater.cli.commands import (
    config,
    debug,
    doctor,
    log,
    pipeline,
    serve,
    source,
    sql,
    status,
    subscription,
    tail,
    token,
)
from headwater.cli.demo import command as demo
from headwater.cli.failure import FAILED, OK, USAGE, Failure
from headwater.cli.output.tables import add_output, print_json, printable
from headwater.errors import ConfigError, HeadwaterError

GROUPS = (serve, status, doctor, source, sql, tail, subscription, token, pipeline, log, debug, config, demo)
INTERRUPTED = 130  # as shells say of Ctrl-C
EPILOG = """exit codes: 0 done, 1 failed or unhealthy, 2 wrong usage or setting, 3 no server answers.
The credential comes from HEADWATER_TOKEN or --token-file, never from an argument."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are two lines."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, but report an unknown flag by the command itself, and never repeat its value."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
            self._refuse(f"unknown flag {flag}" if flag else f"unexpected argument {unknown[0]!r}", flag)
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self._refuse(message)

    def _refuse(self, message: str, flag: str = "") -> NoReturn:
        from difflib import get_close_matches

        near = get_close_matches(flag, self._option_string_actions, 1) if flag else []
        meant = f" (did you mean {near[0]}?)" if near else ""
        print(f"error: {message}{meant}\nhint: {self.prog} --help", file=sys.stderr)
        raise SystemExit(USAGE)


def build_parser() -> Parser:
    """Return the parser of the command line. Abbreviated flags are refused: a new flag must not break a script."""
    parser = Parser(
        prog="headwater",
        description="Makes a SQL database live: an ordered, durable, replayable log of every committed change.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"headwater {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for group in GROUPS:
        group.add(commands)
    version = commands.add_parser("version", help="print the version")
    add_output(version)
    version.set_defaults(run=_version)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except Failure as failure:
        return _complain(failure.message, failure.hint, failure.exit_code)
    except HeadwaterError as error:
        return _complain(error.message, error.hint, USAGE if isinstance(error, ConfigError) else FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"{where}{error.strerror or error}", "Check that the path exists and who may use it.", FAILED)
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        hint = "This is a defect of Headwater, please report it; `python -X dev -m headwater …` shows where."
        return _complain(f"unexpected {type(error).__name__}: {error}", hint, FAILED)


def _complain(message: str, hint: str, exit_code: int) -> int:
    for name, text in (("error", message), ("hint", hint)):
        if text:  # it may hold what a server said
            print(f"{name}: " + "\n".join(map(printable, text.splitlines())), file=sys.stderr)
    return exit_code


def _version(args: argparse.Namespace) -> int:
    if args.output == "json":
        print_json({"name": "headwater", "version": __version__, "python": sys.version.split()[0]})
    else:
        print(f"headwater {__version__}")
    return OK
