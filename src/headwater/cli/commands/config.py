"""Settings of commands: flags over environment over file. Also `headwater config`, which shows them."""

from __future__ import annotations

import argparse
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli.failure import OK, USAGE, Failure
from headwater.cli.output.tables import add_output, print_result
from headwater.model.url_secrets import without_secrets

if TYPE_CHECKING:
    from headwater.config import Config, Setting

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}\Z")


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of commands that read settings."""
    parser.add_argument("--data", metavar="DIR", help="directory of Headwater's own files (./headwater-data)")
    parser.add_argument("--config", metavar="FILE", help="settings in TOML")


def add_databases(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument for any number of databases."""
    parser.add_argument(
        "database", nargs="*", metavar="DATABASE_URL", help="a SQLite file, postgresql://…, or NAME=URL"
    )


def add_token_file(parser: argparse.ArgumentParser) -> None:
    """Add --token-file. No flag takes the credential itself: other users see argv."""
    parser.add_argument(
        "--token-file", metavar="FILE", help="file with the credential, mode 0600 (else HEADWATER_TOKEN)"
    )


def load_config(args: argparse.Namespace, **flags: Any) -> Config:
    """Return the settings of this command; keywords are names of settings, with `__` for the dot."""
    from headwater.settings import load

    given: dict[str, Any] = {name.replace("__", "."): value for name, value in flags.items()}
    given["data"] = getattr(args, "data", None)
    if getattr(args, "database", None):
        given["databases"] = name_databases(args.database)
    file = getattr(args, "config", None)
    return load(file=Path(file) if file else None, environ=environment(args), flags=given)


def credential(config: Config) -> str | None:
    """Return the credential of the settings in clear text; None without one."""
    return None if config.serve.token is None else config.serve.token.encode().decode()


def environment(args: argparse.Namespace) -> Mapping[str, str]:
    """Return the environment, with the credential of --token-file in it."""
    file = getattr(args, "token_file", None)
    return os.environ if file is None else {**os.environ, "HEADWATER_TOKEN": read_token(Path(file))}


def read_token(file: Path) -> str:
    """Return the credential in `file`; Failure if other users may read it."""
    try:
        with file.open(encoding="utf-8") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"cannot read the token file {file}: {error}", exit_code=USAGE) from None
    if stat.S_IMODE(mode) & 0o077:
        raise Failure(f"other users may read the token file {file}", hint=f"chmod 600 {file}", exit_code=USAGE)
    if not text:
        raise Failure(f"the token file {file} is empty", exit_code=USAGE)
    return text


def name_databases(urls: Sequence[str]) -> dict[str, str]:
    """Return URLs by name: a single unnamed database is `main`, several have their file names; Failure for a clash."""
    named: dict[str, str] = {}
    for text in urls:
        name, equals, url = text.partition("=")
        if not (equals and url and _NAME.match(name)):
            name, url = "", text
        name = name or ("main" if len(urls) == 1 else _stem(url))
        if name in named:
            raise Failure(f"two databases are called {name!r}", hint="Name them: NAME=FILE.", exit_code=USAGE)
        named[name] = url
    return named


def _stem(url: str) -> str:
    stem = Path(url.removeprefix("sqlite:").partition("?")[0]).name.partition(".")[0]
    if not _NAME.match(stem) or stem == "default":
        hint = f"Give it a name: NAME={without_secrets(url)}"
        raise Failure(f"{without_secrets(stem)!r} cannot name a database", hint=hint, exit_code=USAGE)
    return stem


# --- the command `config` ------------------------------------------------------------------------------------


def add(commands: Any) -> None:
    """Register `config`."""
    group = commands.add_parser("config", help="show settings").add_subparsers(dest="verb", required=True)
    show = group.add_parser("show", help="the settings in force here, secrets hidden")
    add_databases(show)
    add_config_flags(show)
    add_output(show)
    show.set_defaults(run=_show)
    settings = group.add_parser("settings", help="all settings")
    add_output(settings)
    settings.set_defaults(run=_settings)


def _show(args: argparse.Namespace) -> int:
    from headwater.settings import all_settings

    config = load_config(args)
    found = {setting.name: _value(config, setting) for setting in all_settings()}
    print_result(args.output, found, ("setting", "value"), [(name, _shown(value)) for name, value in found.items()])
    return OK


def _value(config: Config, setting: Setting) -> Any:
    value = getattr(config.section(setting.room), setting.name.rpartition(".")[2])
    if setting.secret:
        return None if value is None else "***"
    if setting.name == "databases":
        return {database.name: without_secrets(database.url) for database in value}
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case dict():
            return ", ".join(f"{name}={url}" for name, url in value.items()) or "none"
        case list():
            return ", ".join(map(str, value)) or "none"
        case _:
            return str(value)


def _settings(args: argparse.Namespace) -> int:
    from headwater.settings import all_settings

    document = [_described(setting) for setting in all_settings()]
    rows = [(s.name, s.type, _shown(_default(s)), s.environment[0], s.doc) for s in all_settings()]
    print_result(args.output, document, ("setting", "type", "default", "environment", "meaning"), rows)
    return OK


def _described(setting: Setting) -> dict[str, Any]:
    return {
        "name": setting.name,
        "type": setting.type,
        "default": _default(setting),
        "environment": list(setting.environment),
        "doc": setting.doc,
    }


def _default(setting: Setting) -> Any:
    return list(setting.default) if isinstance(setting.default, tuple) else setting.default
