"""Reading the settings once, from flags, environment and a TOML file, in that order.

SETTINGS is the table of all of them, made from the dataclasses; loading, `headwater` and the docs follow it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headwater.config.setting_types import SECRET, Kind, unknown
from headwater.config.settings import DATABASES, ROOMS, Config
from headwater.errors import ConfigError

PREFIX = "HEADWATER_"


@dataclass(frozen=True)
class Setting:
    """One line of the table of settings."""

    name: str  # as in the file, with its room: log.retention_age
    room: str
    kind: Kind
    default: Any
    environment: tuple[str, ...]  # the first that is set wins; aliases of other systems come last
    doc: str

    @property
    def type(self) -> str:
        """What it may hold, in words."""
        return self.kind.words

    @property
    def secret(self) -> bool:
        """Whether it must not be printed nor given by a flag."""
        return self.kind is SECRET


def _friendliest(name: str) -> tuple[bool, int, str]:
    return not name.startswith(PREFIX), len(name), name


def _settings(room: str, cls: type) -> Iterable[Setting]:
    for each in fields(cls):
        if "kind" in each.metadata:
            name = f"{room}.{each.name}" if room else each.name
            own = PREFIX + name.replace(".", "_").upper()
            environment = sorted({own, *each.metadata["environment"]}, key=_friendliest)
            yield Setting(name, room, each.metadata["kind"], each.default, tuple(environment), each.metadata["doc"])


SETTINGS: tuple[Setting, ...] = (
    *_settings("", Config),
    *(setting for room, cls in ROOMS.items() for setting in _settings(room, cls)),
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}


# --- loading ---------------------------------------------------------------------------------------------


def load(*, file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Config:
    """The settings: flags (`serve.http`; None means not given) over environment over `file` over defaults."""
    values = _from_file(file) | _from_environment(environ) | _from_flags(flags)
    rooms = {
        room: cls(**{name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{room}.")})
        for room, cls in ROOMS.items()
    }
    return Config(**{name: value for name, value in values.items() if "." not in name}, **rooms)


def _checked(setting: Setting, value: Any, origin: str) -> Any:
    try:
        return setting.kind.check(value)
    except (ValueError, TypeError):
        raise _wrong(setting, value, origin) from None


def _wrong(setting: Setting, value: Any, origin: str) -> ConfigError:
    shown = "" if setting.kind in (SECRET, DATABASES) else f", not {value!r}"  # a URL may hold a password
    return ConfigError(f"{setting.name}: {setting.type} was expected{shown}", hint=f"It is set by {origin}.")


def _from_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        body = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"{file} is not TOML: {error}") from None
    flat: dict[str, Any] = {}
    for name, value in body.items():
        if name not in ROOMS:
            flat[name] = value
        elif isinstance(value, dict):
            flat |= {f"{name}.{inner}": found for inner, found in value.items()}
        else:
            raise ConfigError(f"{name}: a table was expected, not {value!r}", hint=f"Write [{name}].")
    return _known(flat, "setting", str(file))


def _known(flat: Mapping[str, Any], what: str, origin: str) -> dict[str, Any]:
    for name in flat:
        if name not in _BY_NAME:
            raise unknown(what, name, [*_BY_NAME, *ROOMS])
    return {name: _checked(_BY_NAME[name], value, origin) for name, value in flat.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    known = [name for setting in SETTINGS for name in setting.environment]
    for name in environ:
        if name.startswith(PREFIX) and name not in known:
            raise unknown("environment variable", name, known)
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        for name in setting.environment:
            if environ.get(name) and setting.name not in values:
                values[setting.name] = _from_text(setting, environ[name], name)
    return values


def _from_text(setting: Setting, text: str, origin: str) -> Any:
    try:
        return setting.kind.check(setting.kind.parse(text))
    except (ValueError, TypeError):
        raise _wrong(setting, text, origin) from None


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in flags.items() if value is not None}
    for name in given:
        if name in _BY_NAME and _BY_NAME[name].secret:
            better = _BY_NAME[name].environment[0]
            raise ConfigError(
                f"{name} is a secret and cannot be a flag",
                hint=f"Other users see flags: set {better} instead.",
            )
    return _known(given, "flag", "a flag")
