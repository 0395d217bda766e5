"""All settings: those of the rooms, and those of every registered source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwater import config
from headwater.config import Config, Setting
from headwater.sources import registry


def all_settings() -> tuple[Setting, ...]:
    """Return the table of all settings."""
    return config.settings_table(registry.settings_classes())


def load(*, file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Config:
    """Return the settings: `flags` (by name; None: not given) override `environ`, which overrides `file`."""
    return config.load(file=file, environ=environ, flags=flags, sources=registry.settings_classes())
