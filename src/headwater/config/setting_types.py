"""Kinds of settings: a description, a check, and a parser of environment text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from configparser import ConfigParser
from dataclasses import field
from typing import Any, NamedTuple


class Secret(str):
    """Text that is never printed; `encode()` returns the real bytes for a comparison."""

    def __repr__(self) -> str:
        return "'***'"

    def __str__(self) -> str:
        return "***"

    def __format__(self, spec: str) -> str:
        return format("***", spec)


class SettingType(NamedTuple):
    """A kind of setting. `check` returns the value to use or raises ValueError; `parse` converts text for `check`."""

    words: str
    check: Callable[[Any], Any]
    parse: Callable[[str], Any] = str

    @property
    def of_text(self) -> SettingType:
        """Return the same kind for values given as text."""
        return self._replace(check=lambda text: self.check(self.parse(text)))


def need(holds: object) -> None:
    """Raise ValueError unless `holds`."""
    if not holds:
        raise ValueError


def integer(low: int) -> SettingType:
    """Return the kind of the integers from `low` on."""

    def check(value: Any) -> int:
        need(type(value) is int and low <= value < 2**63)
        return int(value)

    return SettingType(f"an integer from {low}", check, int)


def _seconds(value: Any) -> float:
    need(type(value) in (int, float) and math.isfinite(value) and value > 0)
    return float(value)


_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "": 1}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ms|s|m|h|d|)", re.ASCII)


def _duration(value: Any) -> float:
    if not isinstance(value, str):
        return _seconds(value)
    found = _DURATION.fullmatch(value.strip())
    if not found:
        raise ValueError
    return _seconds(float(found[1]) * _UNITS[found[2]])


def _token(value: Any) -> Secret:
    need(type(value) is str and value.isascii() and value.isprintable() and value == value.strip())  # fits a header
    return Secret(text(value))


def text(value: Any) -> str:
    """Return `value`; ValueError unless it is a text that is not empty."""
    need(type(value) is str and value)
    return str(value)


def _address(value: Any) -> str:
    host, _, port = text(value).rpartition(":")
    need(host and re.fullmatch(r"\d{1,5}", port, re.ASCII) and int(port) < 65536)
    return str(value)


def _flag(value: Any) -> bool:
    need(type(value) is bool)
    return bool(value)


def _flag_text(text: str) -> bool:
    need(text.lower() in ConfigParser.BOOLEAN_STATES)
    return ConfigParser.BOOLEAN_STATES[text.lower()]


def _names(value: Any) -> tuple[str, ...]:
    need(isinstance(value, (list, tuple)))
    return tuple(text(name) for name in value)


def _texts(value: Any) -> dict[str, str]:
    need(isinstance(value, dict) and all(type(found) in (str, int, float, bool) for found in value.values()))
    return {name: str(found).lower() if type(found) is bool else str(found) for name, found in value.items()}


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def pairs(text: str) -> dict[str, str]:
    """Return the text `a=1,b=2` as a dict."""
    return dict(part.split("=", 1) for part in _split(text))


def one_of(*choices: str) -> SettingType:
    """Return the kind of the words in `choices`."""

    def check(value: Any) -> str:
        need(value in choices)
        return str(value)

    return SettingType(f"one of {', '.join(choices)}", check)


def or_none(kind: SettingType) -> SettingType:
    """Return a kind that accepts the values of `kind`, and None or "none" as None."""

    def check(value: Any) -> Any:
        return None if value is None or value == "none" else kind.check(value)

    return SettingType(f"{kind.words}, or none", check, lambda text: None if text == "none" else kind.parse(text))


ADDRESS = SettingType("an address like 127.0.0.1:7171", _address)
ADDRESS_OR_OFF = SettingType(
    "an address like 127.0.0.1:7172, or off", lambda value: "off" if value == "off" else _address(value)
)
DURATION = SettingType("a time like 7d, 12h, 30m, 10s, 500ms or a number of seconds", _duration)
SECONDS = SettingType("a number of seconds above 0", _seconds, float)
RATE = SettingType("a number above 0", _seconds, float)
FLAG = SettingType("true or false", _flag, _flag_text)
TEXT = SettingType("a text", text)
NAMES = SettingType("a list of names", _names, _split)
TEXTS = SettingType("a table of texts, numbers and flags", _texts)
SECRET = SettingType("a text", lambda value: Secret(text(value)))
TOKEN = SettingType("a text of printable ASCII characters without spaces around it", _token)


def setting(default: Any, kind: SettingType, doc: str, *environment: str) -> Any:
    """Return the dataclass field of a setting; `environment` are further environment variables that set it."""
    return field(default=default, metadata={"kind": kind, "doc": doc, "environment": environment})
