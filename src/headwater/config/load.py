"""The settings of the server, read once from flags, environment and a TOML file, in that order.

The table of all settings is made from the dataclasses: those of the rooms, and those of the registered sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headwater.config.reader import checked, read_toml, unknown
from headwater.config.setting_types import SECRET, TOKEN, SettingType
from headwater.config.settings import DATABASES, ROOMS, Config
from headwater.errors import ConfigError

PREFIX = "HEADWATER_"


@dataclass(frozen=True)
class Setting:
    """The description of one setting."""

    name: str  # as in the file, with its room: log.retention_age
    room: str
    kind: SettingType
    default: Any
    environment: tuple[str, ...]  # the first that is set wins; aliases of other systems come last
    doc: str

    @property
    def type(self) -> str:
        """Return a description of the allowed values."""
        return self.kind.words

    @property
    def secret(self) -> bool:
        """Return whether the value must not be printed, and not be given by a flag."""
        return self.kind in (SECRET, TOKEN)


def _friendliest(name: str) -> tuple[bool, int, str]:
    return not name.startswith(PREFIX), len(name), name


def _settings(room: str, cls: type) -> Iterable[Setting]:
    for each in fields(cls):
        if "kind" in each.metadata:
            name = f"{room}.{each.name}" if room else each.name
            own = PREFIX + name.replace(".", "_").upper()
            environment = sorted({own, *each.metadata["environment"]}, key=_friendliest)
            yield Setting(name, room, each.metadata["kind"], each.default, tuple(environment), each.metadata["doc"])


def settings_table(sources: Mapping[str, type]) -> tuple[Setting, ...]:
    """Return the descriptions of all settings; `sources` are the settings classes of the sources, by section."""
    sections = ROOMS | dict(sources)
    return (
        *_settings("", Config),
        *(setting for section, cls in sections.items() for setting in _settings(section, cls)),
    )


# --- loading ---------------------------------------------------------------------------------------------


def load(
    *, file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any], sources: Mapping[str, type]
) -> Config:
    """Return the settings: `flags` (by name; None: not given) override `environ`, which overrides `file`."""
    return _Loader(sources).load(file, environ, flags)


class _Loader:
    """Reads settings of the rooms and of `sources`."""

    def __init__(self, sources: Mapping[str, type]) -> None:
        self._sources, self._sections = sources, ROOMS | dict(sources)
        self._table = settings_table(sources)
        self._by_name = {setting.name: setting for setting in self._table}

    def load(self, file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Config:
        values = self._from_file(file) | self._from_environment(environ) | self._from_flags(flags)
        top = {name: value for name, value in values.items() if "." not in name}
        rooms = {room: _section(room, cls, values) for room, cls in ROOMS.items()}
        sources = {name: _section(name, cls, values) for name, cls in self._sources.items()}
        return Config(**top, **rooms, sources=sources)

    def _from_file(self, file: Path | None) -> dict[str, Any]:
        if file is None:
            return {}
        flat: dict[str, Any] = {}
        for name, value in read_toml(file).items():
            if name not in self._sections:
                flat[name] = value
            elif isinstance(value, dict):
                flat |= {f"{name}.{inner}": found for inner, found in value.items()}
            else:
                raise ConfigError(f"{name}: a table was expected, not {value!r}", hint=f"Write [{name}].")
        return self._known(flat, "setting", str(file))

    def _known(self, flat: Mapping[str, Any], what: str, origin: str) -> dict[str, Any]:
        for name in flat:
            if name not in self._by_name:
                raise unknown(what, name, [*self._by_name, *self._sections])
        return {name: _checked(self._by_name[name], value, origin) for name, value in flat.items()}

    def _from_environment(self, environ: Mapping[str, str]) -> dict[str, Any]:
        known = [name for setting in self._table for name in setting.environment]
        for name in environ:
            if name.startswith(PREFIX) and name not in known:
                raise unknown("environment variable", name, known)
        values: dict[str, Any] = {}
        for setting in self._table:
            for name in setting.environment:
                if environ.get(name) and setting.name not in values:
                    values[setting.name] = _checked(setting, environ[name], name, is_text=True)
        return values

    def _from_flags(self, flags: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in flags.items() if value is not None}
        for name in given:
            if name in self._by_name and self._by_name[name].secret:
                better = self._by_name[name].environment[0]
                raise ConfigError(
                    f"{name} is a secret and cannot be a flag",
                    hint=f"Other users see flags: set {better} instead.",
                )
        return self._known(given, "flag", "a flag")


def _section(name: str, cls: type, values: Mapping[str, Any]) -> Any:
    return cls(**{each.partition(".")[2]: value for each, value in values.items() if each.startswith(f"{name}.")})


def _checked(setting: Setting, value: Any, origin: str, *, is_text: bool = False) -> Any:
    shown = "" if setting.secret or setting.kind is DATABASES else repr(value)  # a URL may hold a password
    kind = setting.kind.of_text if is_text else setting.kind
    return checked(setting.name, kind, value, shown=shown, hint=f"It is set by {origin}.")
