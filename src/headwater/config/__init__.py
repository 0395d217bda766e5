"""Settings: one frozen dataclass per room, read once from flags, environment and a TOML file, in that order."""

from headwater.config.load import Setting, load, settings_table
from headwater.config.setting_types import Secret, SettingType
from headwater.config.settings import (
    ROOMS,
    Config,
    DatabaseConfig,
    FeedsConfig,
    LogConfig,
    PullConfig,
    QuotasConfig,
    ServeConfig,
)

__all__ = [
    "ROOMS",
    "Config",
    "DatabaseConfig",
    "FeedsConfig",
    "SettingType",
    "LogConfig",
    "PullConfig",
    "QuotasConfig",
    "Secret",
    "ServeConfig",
    "Setting",
    "load",
    "settings_table",
]
