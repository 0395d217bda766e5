"""Reading of TOML files and checks of values, with the error texts of all settings: server, pipeline, Spark."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headwater.config.setting_types import SettingType
from headwater.errors import ConfigError


def read_toml(file: Path, hint: str = "") -> dict[str, Any]:
    """Return the content of a TOML file; ConfigError if it is not TOML, or, with `hint`, if it cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", hint=hint) from None
    except ValueError:
        raise ConfigError(f"{file} is not TOML: it is not UTF-8 text") from None
    return parse_toml(text, str(file))


def parse_toml(text: str, origin: str) -> dict[str, Any]:
    """Return the content of a TOML text; ConfigError, which names the `origin` of the text, if it is not TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin} is not TOML: {error}") from None


def read_values(
    what: str,
    where: str,
    kinds: Mapping[str, SettingType],
    body: Mapping[str, Any],
    *,
    written: Mapping[str, Any] | None = None,
    hint: str = "",
) -> dict[str, Any]:
    """Return the checked values of `body`; errors quote them as `written`, but none that may contain a password."""
    for name in body:
        if name not in kinds:
            raise unknown(f"{what} of {where}", name, kinds)
    shown = {name: "" if _may_be_secret(value) else repr(value) for name, value in (written or body).items()}
    return {
        name: checked(f"{where}: {name}", kinds[name], value, shown=shown[name], hint=hint)
        for name, value in body.items()
    }


def _may_be_secret(value: Any) -> bool:
    return isinstance(value, dict) or "://" in str(value) or "@" in str(value)


def checked(name: str, kind: SettingType, value: Any, *, shown: str, hint: str = "") -> Any:
    """Return `value` as checked by `kind`; ConfigError, which quotes `shown` ("": a secret), if it is invalid."""
    try:
        return kind.check(value)
    except (ValueError, TypeError):
        raise wrong(name, kind, shown=shown, hint=hint) from None


def wrong(name: str, kind: SettingType, *, shown: str = "", hint: str = "") -> ConfigError:
    """Return the error for a value that is missing, or is not of `kind`."""
    return ConfigError(f"{name}: {kind.words} was expected{shown and f', not {shown}'}", hint=hint)


def unknown(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a name that is not `known`; the hint is the known name most like it."""
    (nearest,) = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return ConfigError(f"unknown {what} {name!r}", hint=f"Did you mean {nearest}?")
