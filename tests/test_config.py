"""Settings: one order of precedence, nothing unknown accepted, no secret shown."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.config import ROOMS, Config, DatabaseConfig, Secret
from headwater.errors import ConfigError
from headwater.settings import all_settings, load
from headwater.sources.registry import settings_classes

SETTINGS = all_settings()
DEFAULTS = Config(sources={name: cls() for name, cls in settings_classes().items()})


def file_with(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "headwater.toml"
    path.write_text(text)
    return path


def from_env(**environ: str) -> Config:
    return load(file=None, environ=environ, flags={})


def from_toml(tmp_path: Path, text: str) -> Config:
    return load(file=file_with(tmp_path, text), environ={}, flags={})


def from_flags(**flags: Any) -> Config:
    return load(file=None, environ={}, flags={name.replace("__", "."): value for name, value in flags.items()})


def value_of(config: Config, name: str) -> Any:
    room, _, field = name.rpartition(".")
    return getattr(config.section(room), field)


def test_config_without_settings_has_the_defaults() -> None:
    assert load(file=None, environ={"PATH": "/bin"}, flags={}) == DEFAULTS
    config = Config()
    assert (config.serve.http, config.serve.grpc) == ("127.0.0.1:7171", "127.0.0.1:7172")
    assert (config.log.retention_events, config.log.retention_bytes, config.log.retention_age) == (
        1_000_000,
        None,
        None,
    )
    assert config.serve.max_body_bytes == 16 * 1024 * 1024


def test_flags_override_environment_which_overrides_file_and_defaults(tmp_path: Path) -> None:
    toml = file_with(tmp_path, 'data = "file"\n[serve]\nhttp = "h:1"\ngrpc = "h:2"\n[log]\nflush_ms = 3\n')
    environ = {"HEADWATER_HTTP": "h:10", "HEADWATER_SERVE_GRPC": "h:20"}
    config = load(file=toml, environ=environ, flags={"serve.http": "h:100", "serve.auth": None})
    assert (config.serve.http, config.serve.grpc, config.log.flush_ms) == ("h:100", "h:20", 3)
    assert (config.data, config.serve.auth) == ("file", False)


SAMPLES: dict[str, tuple[str, str, Any]] = {  # setting -> environment text, TOML text, value
    "data": ("/x", '"/x"', "/x"),
    "databases": (
        "main=/a.db, b=c=d",
        '{main = "/a.db", b = "c=d"}',
        (DatabaseConfig("main", "/a.db"), DatabaseConfig("b", "c=d")),
    ),
    "ca": ("/ca.pem", '"/ca.pem"', "/ca.pem"),
    "serve.http": ("[::1]:0", '"[::1]:0"', "[::1]:0"),
    "serve.grpc": ("h:65535", '"h:65535"', "h:65535"),
    "serve.token": ("s3cret", '"s3cret"', "s3cret"),
    "serve.auth": ("yes", "true", True),
    "serve.key_pepper": ("pepper", '"pepper"', "pepper"),
    "serve.jwt_secret": ("s3cret", '"s3cret"', "s3cret"),
    "serve.jwt_keys": ("/keys.json", '"/keys.json"', "/keys.json"),
    "serve.jwt_issuer": ("https://issuer", '"https://issuer"', "https://issuer"),
    "serve.jwt_audience": ("headwater", '"headwater"', "headwater"),
    "serve.tls_cert": ("/a.pem", '"/a.pem"', "/a.pem"),
    "serve.tls_key": ("/a.key", '"/a.key"', "/a.key"),
    "serve.tls_ca": ("/ca.pem", '"/ca.pem"', "/ca.pem"),
    "serve.tls_http_clients": ("on", "true", True),
    "serve.max_body_bytes": ("2048", "2048", 2048),
    "serve.drain_seconds": ("3", "3", 3.0),
    "serve.metrics_open": ("1", "true", True),
    "serve.cors_origins": ("https://a, https://b", '["https://a", "https://b"]', ("https://a", "https://b")),
    "serve.ready": ("all", '"all"', "all"),
    "serve.max_streams": ("7", "7", 7),
    "serve.max_streams_per_client": ("3", "3", 3),
    "serve.max_connections": ("8", "8", 8),
    "serve.max_connections_per_client": ("4", "4", 4),
    "serve.rate": ("0.5", "0.5", 0.5),
    "serve.burst": ("7", "7", 7),
    "serve.stall_seconds": ("9", "9", 9.0),
    "serve.ticket_seconds": ("5", "5", 5.0),
    "feeds.checkpoint_seconds": ("0.5", "0.5", 0.5),
    "feeds.max_subscriptions": ("9", "9", 9),
    "feeds.max_subscription_bytes": ("4096", "4096", 4096),
    "feeds.lease_seconds": ("60", "60", 60.0),
    "feeds.lease_bytes": ("0", "0", 0),
    "feeds.catchups": ("2", "2", 2),
    "feeds.catchup_budget": ("1000", "1000", 1000),
    "feeds.slow_consumer_seconds": ("2", "2", 2.0),
    "pull.target_bytes": ("1024", "1024", 1024),
    "pull.cache_bytes": ("0", "0", 0),
    "queries.max_prepared": ("10", "10", 10),
    "queries.public": ("true", "true", True),
    "queries.answer_bytes": ("2097152", "2097152", 2 << 20),
    "queries.answers_bytes": ("4194304", "4194304", 4 << 20),
    "queries.sample": ("0", "0", 0),
    "quotas.rate": ("50", "50", 50.0),
    "quotas.burst": ("5", "5", 5),
    "quotas.max_streams": ("6", "6", 6),
    "quotas.max_subscriptions": ("3", "3", 3),
    "log.retention_events": ("none", '"none"', None),
    "log.retention_bytes": ("5", "5", 5),
    "log.retention_age": ("7d", '"7d"', 604800.0),
    "log.flush_ms": ("0", "0", 0),
    "sqlite.wal": ("on", "true", True),
    "sqlite.foreign_keys": ("FALSE", "false", False),
    "sqlite.tables": ("a, b", '["a", "b"]', ("a", "b")),
    "sqlite.tx_seconds": ("0.5", "0.5", 0.5),
    "sqlite.tx_idle_seconds": ("0.25", "0.25", 0.25),
    "sqlite.statement_seconds": ("5", "5", 5.0),
    "sqlite.trim_rows": ("7", "7", 7),
    "sqlite.trim_seconds": ("2", "2", 2.0),
    "sqlite.poll_seconds": ("1", "1", 1.0),
    "sqlite.on_discontinuity": ("stop", '"stop"', "stop"),
    "postgres.slot": ("mine", '"mine"', "mine"),
    "postgres.publication": ("ours", '"ours"', "ours"),
    "postgres.tables": ("a, s.b", '["a", "s.b"]', ("a", "s.b")),
    "postgres.publish_all": ("true", "true", True),
    "postgres.heartbeat_seconds": ("3", "3", 3.0),
    "postgres.tx_seconds": ("0.5", "0.5", 0.5),
    "postgres.tx_idle_seconds": ("0.25", "0.25", 0.25),
    "postgres.statement_seconds": ("7", "7", 7.0),
    "postgres.reader": ("reads", '"reads"', "reads"),
    "postgres.writer": ("writes", '"writes"', "writes"),
    "postgres.reader_password_file": ("/run/r", '"/run/r"', "/run/r"),
    "postgres.writer_password_file": ("/run/w", '"/run/w"', "/run/w"),
    "postgres.on_discontinuity": ("stop", '"stop"', "stop"),
}


def test_every_setting_has_a_sample_value() -> None:
    assert set(SAMPLES) == {setting.name for setting in SETTINGS}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_is_read_from_each_of_its_environment_names(setting: Any) -> None:
    text, _, value = SAMPLES[setting.name]
    assert value_of(DEFAULTS, setting.name) == setting.default != value
    for name in setting.environment:
        assert value_of(from_env(**{name: text}), setting.name) == value


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_is_read_from_the_file(setting: Any, tmp_path: Path) -> None:
    _, toml, value = SAMPLES[setting.name]
    field = setting.name.rpartition(".")[2]
    text = f"[{setting.room}]\n{field} = {toml}\n" if setting.room else f"{field} = {toml}\n"
    assert value_of(from_toml(tmp_path, text), setting.name) == value


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_each_setting_has_a_description_a_type_and_an_environment_name(setting: Any) -> None:
    assert setting.doc
    assert setting.type
    assert f"HEADWATER_{setting.name.replace('.', '_').upper()}" in setting.environment


def test_settings_table_contains_every_config_field() -> None:
    sections = ROOMS | settings_classes()
    by_hand = {f"{room}.{field.name}" for room, cls in sections.items() for field in dataclasses.fields(cls)}
    assert {setting.name for setting in SETTINGS} == by_hand | {"data", "databases", "ca"}
    assert {field.name for field in dataclasses.fields(Config)} == {*ROOMS, "data", "databases", "ca", "sources"}


def test_skeindb_variables_are_read_and_overridden_by_headwater_variables() -> None:
    config = from_env(SKEINDB_TOKEN="theirs", SKEINDB_CDC_RETENTION_EVENTS="5")
    assert (config.serve.token, config.log.retention_events) == ("theirs", 5)
    config = from_env(SKEINDB_TOKEN="theirs", HEADWATER_TOKEN="ours", SKEINDB_OTHER="ignored")
    assert config.serve.token == "ours"


def test_empty_environment_variable_is_ignored() -> None:
    assert from_env(HEADWATER_TOKEN="", HEADWATER_HTTP="") == DEFAULTS


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7d", 604800), ("12h", 43200), ("30m", 1800), ("10s", 10), ("500ms", 0.5), ("90", 90), ("1.5h", 5400)],
)
def test_duration_is_read_with_a_unit_or_in_seconds(text: str, seconds: float, tmp_path: Path) -> None:
    assert from_env(HEADWATER_LOG_RETENTION_AGE=text).log.retention_age == seconds
    assert from_toml(tmp_path, f"[log]\nretention_age = {seconds}\n").log.retention_age == seconds


@pytest.mark.parametrize(
    ("text", "unknown", "nearest"),
    [
        ("[serve]\nhtpp = 'h:1'\n", "serve.htpp", "serve.http"),
        ("[log]\nretention_event = 1\n", "log.retention_event", "log.retention_events"),
        ("[serv]\nhttp = 'h:1'\n", "serv", "serve"),
        ("dat = 'x'\n", "dat", "data"),
    ],
)
def test_unknown_key_in_the_file_is_refused_with_the_nearest_name(
    text: str, unknown: str, nearest: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{unknown}'") as caught:
        from_toml(tmp_path, text)
    assert f"Did you mean {nearest}" in caught.value.hint


def test_unknown_headwater_variable_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown environment variable 'HEADWATER_TOKN'") as caught:
        from_env(HEADWATER_TOKN="s3cret")
    assert caught.value.hint == "Did you mean HEADWATER_TOKEN?"
    assert "s3cret" not in caught.value.message


def test_unknown_flag_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown flag 'sqlite.wall'") as caught:
        from_flags(sqlite__wall=True)
    assert caught.value.hint == "Did you mean sqlite.wal?"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("serve = 5\n", "serve"),
        ("[serve]\nhttp = 7171\n", "serve.http"),
        ("[serve]\nhttp = 'localhost'\n", "serve.http"),
        ("[serve]\nhttp = 'h:65536'\n", "serve.http"),
        ("[serve]\nhttp = ':80'\n", "serve.http"),
        ("[serve]\ntoken = ''\n", "serve.token"),
        ("[serve]\nauth = 1\n", "serve.auth"),
        ("[serve]\nauth = 'yes'\n", "serve.auth"),
        ("[serve]\nmax_body_bytes = 0\n", "serve.max_body_bytes"),
        ("[serve]\nmax_body_bytes = true\n", "serve.max_body_bytes"),
        ("[serve]\nmax_body_bytes = '2048'\n", "serve.max_body_bytes"),
        ("[serve]\ndrain_seconds = -1\n", "serve.drain_seconds"),
        ("[serve]\ndrain_seconds = nan\n", "serve.drain_seconds"),
        ("[serve]\ndrain_seconds = inf\n", "serve.drain_seconds"),
        ("[log]\nretention_events = 0\n", "log.retention_events"),
        ("[log]\nretention_events = 1.5\n", "log.retention_events"),
        ("[log]\nretention_age = '7 days'\n", "log.retention_age"),
        ("[log]\nretention_age = '0s'\n", "log.retention_age"),
        ("[log]\nretention_age = true\n", "log.retention_age"),
        ("[sqlite]\ntables = 'a'\n", "sqlite.tables"),
        ("[sqlite]\ntables = [1]\n", "sqlite.tables"),
        ("[sqlite]\non_discontinuity = 'ignore'\n", "sqlite.on_discontinuity"),
        ("[sqlite]\non_discontinuity = []\n", "sqlite.on_discontinuity"),
        ("databases = ['a']\n", "databases"),
        ("[databases]\n'../a' = 'x'\n", "databases"),
        ("[databases]\ndefault = 'x'\n", "databases"),
        ("[databases]\nmain = 5\n", "databases"),
    ],
)
def test_invalid_value_in_the_file_is_refused_with_its_path_and_origin(text: str, path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        from_toml(tmp_path, text)
    assert caught.value.message.startswith(f"{path}: ")
    assert "headwater.toml" in caught.value.hint or caught.value.hint == f"Write [{path}]."


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("HEADWATER_HTTP", "nowhere"),
        ("HEADWATER_CDC_RETENTION_EVENTS", "many"),
        ("HEADWATER_LOG_RETENTION_AGE", "1w"),
        ("HEADWATER_SQLITE_WAL", "maybe"),
        ("HEADWATER_SQLITE_TX_SECONDS", "nan"),
        ("HEADWATER_SQLITE_TABLES", "a,,b"),
        ("HEADWATER_DATABASES", "main"),
    ],
)
def test_invalid_environment_variable_is_refused_with_its_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_env(**{name: text})
    assert caught.value.hint == f"It is set by {name}."


@given(
    st.sampled_from(SETTINGS),
    st.text(min_size=1) | st.none() | st.integers() | st.floats() | st.lists(st.none()),
)
@settings(deadline=None)
def test_any_setting_value_is_accepted_or_raises_a_config_error(setting: Any, value: Any) -> None:
    try:
        if isinstance(value, str):
            from_env(**{setting.environment[0]: value})
        load(file=None, environ={}, flags={setting.name: value})
    except ConfigError as error:
        assert error.message.startswith(setting.name)


def test_missing_or_invalid_settings_file_raises_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read .*nowhere.toml: No such file"):
        load(file=tmp_path / "nowhere.toml", environ={}, flags={})
    with pytest.raises(ConfigError, match="is not TOML"):
        from_toml(tmp_path, "data = \n")
    (tmp_path / "headwater.toml").write_bytes(b"data = '\xff'")
    with pytest.raises(ConfigError, match="is not TOML"):
        load(file=tmp_path / "headwater.toml", environ={}, flags={})


def test_secret_given_as_a_flag_is_refused_with_the_environment_variable() -> None:
    with pytest.raises(ConfigError, match="serve.token is a secret") as caught:
        from_flags(serve__token="s3cret")
    assert "HEADWATER_TOKEN" in caught.value.hint
    assert "s3cret" not in caught.value.message + caught.value.hint


@pytest.mark.parametrize("token", ["two\nlines", "carriage\rreturn", "ümlaut", "\ufeffmark", "nul\0", " xyz", "xyz "])
def test_token_that_no_header_can_hold_is_refused_and_not_printed(token: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII") as refused:
        from_env(HEADWATER_TOKEN=token)
    assert token not in refused.value.message + refused.value.hint


def test_secret_is_never_printed() -> None:
    config = from_env(HEADWATER_TOKEN="s3cret")
    token = config.serve.token
    assert token is not None
    shown = [repr(config), str(config), f"{token}", f"{token:>9}", str(token), repr(token), "%s" % token]  # noqa: UP031
    assert not [text for text in shown if "s3cret" in text]
    assert token == "s3cret"
    assert token.encode() == b"s3cret"
    assert isinstance(token, Secret)


def test_invalid_database_url_is_not_printed_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        from_env(HEADWATER_DATABASES="a b=postgres://u:s3cret@h/d")
    assert "s3cret" not in caught.value.message + caught.value.hint


def test_settings_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().serve.http = "h:1"  # type: ignore[misc]


def test_database_retention_limits_override_the_global_limits(tmp_path: Path) -> None:
    file = tmp_path / "headwater.toml"
    file.write_text(
        '[log]\nretention_events = 50\n[databases]\nb = "b.db"\n[databases.a]\nurl = "a.db"\nretention_events = 5\n'
        'retention_age = "1h"\n'
    )
    config = load(file=file, environ={}, flags={})
    logs = {database.name: config.log_of(database) for database in config.databases}
    assert (logs["a"].retention_events, logs["a"].retention_age) == (5, 3600)
    assert (logs["b"].retention_events, logs["b"].retention_age) == (50, None)


def test_database_quotas_override_the_global_quotas(tmp_path: Path) -> None:
    config = from_toml(
        tmp_path,
        '[quotas]\nrate = 50\nmax_streams = 9\n[databases]\nb = "b.db"\n'
        '[databases.a]\nrate = "none"\nmax_subscriptions = 2\nretention_bytes = 1000\n',
    )
    a, b, other = map(config.quotas_of, ("a", "b", "other"))
    assert (a.rate, a.max_streams, a.max_subscriptions) == (None, 9, 2)
    assert (b.rate, b.max_streams, b.max_subscriptions) == (50, 9, None)
    assert other == config.quotas
    assert config.named("a").url == "" and config.log_of(config.named("a")).retention_bytes == 1000


@pytest.mark.parametrize(
    "line",
    [
        "retention_event = 5",
        'retention_events = "x"',
        "retention_events = 0",
        "rate = 0",
        "rate = true",
        "max_streams = -1",
        "burst = 1.5",
    ],
)
def test_invalid_limit_of_a_database_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "headwater.toml"
    file.write_text(f'[databases.a]\nurl = "a.db"\n{line}\n')
    with pytest.raises(ConfigError):
        load(file=file, environ={}, flags={})


@pytest.mark.parametrize("url", ["postgresql:me:tiger@host/db", "host=h password=tiger", "password = tiger host=h"])
def test_database_address_with_a_password_that_is_not_a_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="does not begin with postgresql://") as raised:
        load(file=None, environ={}, flags={"databases": {"pg": url}})
    assert "tiger" not in str(raised.value) + raised.value.hint
