"""A pipeline's TOML: its meaning, its refusals with their place, and that template and docs have every key."""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest
from tests.doc_pages import code, page, table

from headwater.config.reader import parse_toml
from headwater.errors import ConfigError
from headwater.pipeline.run.progress import MetaStore
from headwater.pipeline.run.spec import (
    PIPELINE_KEYS,
    TABLE_KEYS,
    TEMPLATE,
    Key,
    PipelineSpec,
    SinkSpec,
    TableSpec,
    read_spec,
    spec_of,
)
from headwater.pipeline.sinks.delta.delta import Settings
from headwater.pipeline.sinks.registry import KINDS

FOLDER = Path("/srv/pipelines")
SINK = '[table.sink]\nkind = "delta"\npath = "lake/{table}"\n'


def parsed(text: str, **environ: str) -> PipelineSpec:
    return spec_of(parse_toml(text, "lake.toml"), FOLDER, "lake.toml", environ)


def refusal(text: str, **environ: str) -> str:
    """Return the error and the hint for a wrong file."""
    with pytest.raises(ConfigError) as caught:
        parsed(text, **environ)
    return f"{caught.value.message} | {caught.value.hint}"


def pipeline(*lines: str, table: str = 'table = "orders"', sink: str = SINK) -> str:
    return "\n".join(["[pipeline]", 'name = "lake"', *lines, "[[table]]", table, sink])


# --- what it means ---------------------------------------------------------------------------------------


def test_minimal_pipeline_file_gets_the_defaults() -> None:
    spec = parsed(pipeline())
    assert spec == PipelineSpec(
        (TableSpec("orders", SinkSpec("delta", {"path": "/srv/pipelines/lake/orders"})),),
        "lake",
        meta="/srv/pipelines/headwater-pipeline.db",
    )
    assert (spec.server, spec.master, spec.guarantee) == ("http://127.0.0.1:7171", "local[*]", "exactly-once")


def test_pipeline_file_with_every_key_is_parsed() -> None:
    spec = parsed(
        """
        [pipeline]
        name = "lake"
        server = "https://example.org:7171/"
        token_file = "token"
        meta = "postgresql://me@db/meta"
        master = "spark://host:7077"
        guarantee = "at-least-once"
        parallelism = 8
        range_bytes = 1000
        step_rows = 10
        step_bytes = 20
        lease_seconds = "1m"
        metrics = "127.0.0.1:9109"
        packages = ["a:b:1"]
        jars = ["jars/x.jar", "https://example.org/y.jar"]
        conf = { "spark.driver.memory" = "2g", "spark.ui.enabled" = true, "spark.cores.max" = 3 }
        [[table]]
        db = "shop"
        table = "orders"
        columns = ["id", "total"]
        where = "total > 0"
        schema = "pin"
        on_lost = "fail"
        sink = { kind = "kafka", topic = "shop.{db}.{table}", servers = "a:1" }
        """
    )
    assert spec == PipelineSpec(
        (
            TableSpec(
                "orders",
                SinkSpec("kafka", {"topic": "shop.shop.orders", "servers": "a:1"}),
                "shop",
                ("id", "total"),
                "total > 0",
                "pin",
                "fail",
            ),
        ),
        "lake",
        "https://example.org:7171",
        "/srv/pipelines/token",
        "postgresql://me@db/meta",
        "spark://host:7077",
        "at-least-once",
        8,
        1000,
        10,
        20,
        60.0,
        "127.0.0.1:9109",
        ("a:b:1",),
        ("/srv/pipelines/jars/x.jar", "https://example.org/y.jar"),
        {"spark.driver.memory": "2g", "spark.ui.enabled": "true", "spark.cores.max": "3"},
    )


def test_entry_with_several_tables_gives_each_table_its_own_path() -> None:
    spec = parsed(pipeline(table='tables = ["orders", "customers"]\ndb = "shop"'))
    assert [(each.db, each.table, each.sink.settings["path"]) for each in spec.tables] == [
        ("shop", "orders", "/srv/pipelines/lake/orders"),
        ("shop", "customers", "/srv/pipelines/lake/customers"),
    ]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lake", "/srv/pipelines/lake"),
        ("/data/lake", "/data/lake"),
        ("s3://bucket/lake", "s3://bucket/lake"),
        ("~/lake", str(Path("~/lake").expanduser())),
    ],
)
def test_relative_paths_are_resolved_from_the_folder_of_the_pipeline_file(given: str, meant: str) -> None:
    spec = parsed(pipeline(f'meta = "{given}"', sink=f'[table.sink]\nkind = "delta"\npath = "{given}"'))
    assert (spec.meta, spec.tables[0].sink.settings["path"]) == (meant, meant)


def test_relative_sqlite_url_is_resolved_from_the_folder_of_the_pipeline_file() -> None:
    sink = '[table.sink]\nkind = "sql"\nurl = "sqlite:///copy.db"\ntable = "t"'
    spec = parsed(pipeline('meta = "sqlite:////data/meta.db"', sink=sink))
    assert spec.tables[0].sink.settings["url"] == "sqlite:////srv/pipelines/copy.db"
    assert spec.meta == "sqlite:////data/meta.db"


def test_environment_variables_are_substituted_and_secrets_are_not_shown() -> None:
    sink = '[table.sink]\nkind = "sql"\nurl = "postgresql://me:${PW}@db/x"\nurl_file = "${PW}"\ntable = "${HERE}"'
    spec = parsed(pipeline(sink=sink), PW="tiger", HERE="yes")
    (found,) = spec.tables
    assert found.sink.settings["url"] == "postgresql://me:tiger@db/x"
    assert found.sink.shown == "sql url=postgresql://db/x table=yes"
    assert "tiger" not in repr(spec)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:tiger@db:5432/x?sslmode=on", "postgresql://db:5432/x"),
        ("postgresql+psycopg://me:ti@ger@db/x", "postgresql+psycopg://db/x"),
        ("postgresql://me:ti/ger@db/x", "postgresql://…"),
        ("postgresql://me:t@i/g@er/x@db/x", "postgresql://…"),
        ("postgresql://me:ti?ger@db/x", "postgresql://…"),
        ("postgresql://me:ti#ger@db/x", "postgresql://…"),
        ("postgresql://db/x?password=tiger&sslpassword=tiger", "postgresql://db/x"),
        ("postgresql://db/x?password=ti@ger", "postgresql://…"),
        ("postgresql://me:tiger", "postgresql://…"),
        ("mysql://me:tiger@[::1]:3306/x;password=tiger#tiger", "mysql://[::1]:3306/x"),
        ("sqlite:////srv/copy.db?key=tiger", "sqlite:////srv/copy.db"),
    ],
)
def test_shown_url_omits_credentials_and_query(url: str, shown: str) -> None:
    assert SinkSpec("sql", {"url": url}).shown == f"sql url={shown}"
    assert SinkSpec("delta", {"path": url}).shown == f"delta path={shown}"


def test_shown_sink_omits_options_and_secrets() -> None:
    lake = {"path": "s3://b/x", "mode": "upsert", "storage_options": {"AWS_SECRET_ACCESS_KEY": "tiger"}}
    assert SinkSpec("delta", lake).shown == "delta path=s3://b/x mode=upsert"
    topic = {"topic": "t", "servers": "h:9092", "options": {"kafka.sasl.jaas.config": "x password=tiger"}}
    assert SinkSpec("kafka", topic).shown == "kafka topic=t servers=h:9092"
    assert SinkSpec("kafka", {"topic": {"password": "tiger"}, "passphrase": "tiger", "url_env": "X"}).shown == "kafka"


def test_meta_store_holds_no_secret(tmp_path: Path) -> None:
    sink = '[table.sink]\nkind = "delta"\npath = "s3://b/x"\n[table.sink.storage_options]\nKEY = "tiger"'
    spec = parsed(pipeline(f'meta = "{tmp_path}/meta.db"\n[pipeline.conf]\n"spark.key" = "tiger"', sink=sink))
    with MetaStore.open(spec.meta) as meta:
        meta.subscribe(spec, spec.tables[0])
        assert "tiger" not in repr(meta.tasks()) + repr(spec)
    assert all(b"tiger" not in file.read_bytes() for file in tmp_path.iterdir())


def test_pipeline_file_is_read_relative_to_its_folder(tmp_path: Path) -> None:
    (tmp_path / "lake.toml").write_text(pipeline())
    assert read_spec(tmp_path / "lake.toml").meta == str(tmp_path / "headwater-pipeline.db")


# --- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = ", "lake.toml is not TOML: Invalid value"),
        ("", "lake.toml has no [pipeline]"),
        ("[pipelines]", "unknown part of a pipeline 'pipelines' | Did you mean pipeline?"),
        ('[pipeline]\nname = "x"', "names no table to carry | Write [[table]]"),
        ('[pipeline]\nname = "x"\n[table]\ntable = "a"', "names no table to carry | Write [[table]]"),
        (pipeline().replace('name = "lake"', ""), "pipeline.name: a name of letters"),
        (pipeline().replace('"lake"', '"a/b"'), "pipeline: name: a name of letters, digits, _ . and -, at most 64"),
        (pipeline("paralellism = 3"), "unknown key of pipeline 'paralellism' | Did you mean parallelism?"),
        (pipeline("parallelism = 0"), "pipeline: parallelism: an integer from 1 was expected, not 0"),
        (pipeline('guarantee = "twice"'), "one of exactly-once, at-least-once was expected, not 'twice'"),
        (pipeline('lease_seconds = "soon"'), "pipeline: lease_seconds: a time like 7d"),
        (pipeline('server = "http://me:pw@host"'), "a URL like http://127.0.0.1:7171, without a password"),
        (pipeline("conf = 3"), "pipeline: conf: a table of texts"),
        (pipeline(table='table = "a"\nfilter = "x"'), "unknown key of table 1 (a) 'filter'"),
        (pipeline(table='table = "a"\nschema = "x"'), "table 1 (a): schema: one of evolve, pin, fail was expected"),
        (pipeline(table=""), "table 1: exactly one of `table` and `tables` is needed"),
        (pipeline(table='table = "a"\ntables = ["b"]'), "table 1 (a): exactly one of `table` and `tables` is needed"),
        (pipeline(table="tables = []"), "table 1: exactly one of `table` and `tables` is needed"),
        (pipeline(sink=""), "table 1 (orders): sink: a table with `kind` is needed"),
        (pipeline(sink='[table.sink]\npath = "x"'), "table 1 (orders): sink: a table with `kind` is needed"),
        (pipeline(sink='[table.sink]\nkind = "dleta"'), "'dleta' | Did you mean delta?"),
        (pipeline() + '[[table]]\ntable = "orders"\n' + SINK, "table main.orders is carried twice"),
        (
            pipeline(sink=SINK.replace("{table}", "x"), table='tables = ["a", "b"]'),
            "tables a and b have the same sink location",
        ),
        (pipeline(table='table = "${GONE}"'), "table 1 (${GONE}): table: the environment variable GONE is not set"),
        (
            pipeline(sink='[table.sink]\nkind = "delta"\npth = "x"'),
            "setting of table 1 (orders): sink 'pth' | Did you mean path?",
        ),
        (
            pipeline(sink='[table.sink]\nkind = "delta"'),
            "table 1 (orders): sink: `path` is needed | Settings: path, mode",
        ),
        (
            pipeline(sink='[table.sink]\nkind = "delta"\npath = "x"\nmode = "append"'),
            "table 1 (orders): sink: mode: one of upsert, history was expected, not 'append' | It is set by",
        ),
        (
            pipeline(sink='[table.sink]\nkind = "sql"\ntable = "t"\nlock_seconds = "long"'),
            "table 1 (orders): sink: lock_seconds: an integer from 0 was expected, not 'long'",
        ),
        (
            pipeline(sink=SINK.replace("{table}", "{tabel}")),
            "table 1 (orders): sink: path: unknown placeholder {tabel} | There are: {db}, {table}.",
        ),
        (
            pipeline(sink='[table.sink]\nkind = "sql"\ntable = "t"\nurl = "${GONE}"'),
            "sink: the environment variable GONE is not",
        ),
    ],
)
def test_wrong_pipeline_file_is_refused_with_the_place_of_the_error(text: str, said: str) -> None:
    assert said in refusal(text)


def test_refusal_of_a_value_hides_secrets() -> None:
    assert "tiger" not in refusal(pipeline('server = "ftp://x:${PW}@y"'), PW="tiger")
    assert "tiger" not in refusal(pipeline('server = "ftp://x:tiger@y"'))
    assert "ger" not in refusal(pipeline('server = "http://x:ti@ti/ger@y"')).replace("integer", "")
    assert "tiger" not in refusal(pipeline('[pipeline.conf]\nnested = { password = "tiger" }'))


def test_kafka_topic_shared_by_several_tables_is_accepted() -> None:
    sink = '[table.sink]\nkind = "kafka"\ntopic = "all"\nservers = "a:1"'
    assert len(parsed(pipeline(table='tables = ["a", "b"]', sink=sink)).tables) == 2


def test_unreadable_pipeline_file_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file") as caught:
        read_spec(tmp_path / "none.toml")
    assert "headwater pipeline init" in caught.value.hint
    (tmp_path / "latin.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_spec(tmp_path / "latin.toml")


def test_braces_in_an_environment_value_are_not_expanded() -> None:
    spec = parsed(pipeline(sink=SINK.replace("lake/", "${HERE}/")), HERE="a{b}")
    assert spec.tables[0].sink.settings["path"] == "/srv/pipelines/a{b}/orders"


# --- the template and the docs ---------------------------------------------------------------------------


def uncommented(text: str) -> str:
    """Return the template with every commented example enabled."""
    return re.sub(r"^# (?=[\[\w\"].*[=\]])", "", text, flags=re.MULTILINE)


def test_template_parses_as_a_pipeline() -> None:
    spec = parsed(TEMPLATE)
    assert [(each.table, each.sink.settings) for each in spec.tables] == [
        ("orders", {"path": "/srv/pipelines/lake/orders"})
    ]


def test_template_shows_every_key_with_its_default() -> None:
    body: dict[str, Any] = tomllib.loads(uncommented(TEMPLATE))
    assert set(body["pipeline"]) == {key.name for key in PIPELINE_KEYS}
    assert set(body["table"][0]) | {"tables"} == {key.name for key in TABLE_KEYS}
    parsed(uncommented(TEMPLATE))
    for key in (*PIPELINE_KEYS, *TABLE_KEYS):
        shown = body["pipeline"].get(key.name, body["table"][0].get(key.name))
        if key.default not in (MISSING, None, ()):
            assert key.kind.check(shown) == key.default, key.name
    assert all(kind in TEMPLATE for kind in KINDS)


def shown(key: Key) -> str:
    if key.default is MISSING or key.default is None or key.default == ():
        return ""
    return code(f"{key.default:g}" if isinstance(key.default, float) else str(key.default))


@pytest.mark.parametrize(("heading", "keys"), [("[pipeline]", PIPELINE_KEYS), ("[[table]]", TABLE_KEYS)])
def test_pipeline_keys_are_documented_with_type_default_and_meaning(heading: str, keys: tuple[Key, ...]) -> None:
    section = page("docs/pipeline.md").split(f"### `{heading}`")[1].split("\n### ")[0]
    documented = table(section, "key", "type", "default", "meaning")
    assert documented == [[code(key.name), key.kind.words, shown(key), key.doc] for key in keys]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "delta-spark"])
def test_sink_settings_are_all_documented(kind: str) -> None:
    section = page("docs/pipeline.md").split(f"### `{kind}`")[1].split("\n### ")[0]
    documented = table(section, "setting", "type", "default", "meaning")
    assert [row[0] for row in documented] == [code(name) for name in KINDS[kind].settings]
    assert tuple(KINDS["delta-spark"].settings) == tuple(KINDS["delta"].settings) == Settings.__struct_fields__
