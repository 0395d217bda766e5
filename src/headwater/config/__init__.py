"""Settings: one frozen dataclass per room, read once from flags, environment and a TOML file, in that order."""

from headwater.config.load import SETTINGS, Setting, load
from headwater.config.setting_types import Kind, Secret
from headwater.config.settings import (
    ROOMS,
    Config,
    DatabaseConfig,
    FeedsConfig,
    LogConfig,
    PostgresConfig,
    PullConfig,
    QuotasConfig,
    ServeConfig,
    SqliteConfig,
)

__all__ = [
    "ROOMS",
    "SETTINGS",
    "Config",
    "DatabaseConfig",
    "FeedsConfig",
    "Kind",
    "LogConfig",
    "PostgresConfig",
    "PullConfig",
    "QuotasConfig",
    "Secret",
    "ServeConfig",
    "Setting",
    "SqliteConfig",
    "load",
]
