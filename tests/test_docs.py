"""The documentation and the code name the same settings, verbs, methods, metrics and errors."""

import ast
import functools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import NODEFAULT
from tests.doc_pages import METHOD_PAGES, PAGES, ROOT, blocks, code, literals, page, prose, table

from headwater import errors
from headwater.cli.commands.config import _default, _shown
from headwater.cli.main import build_parser
from headwater.model.control_events import ControlEvent
from headwater.model.literal import TAGS, from_lit, to_plain
from headwater.model.predicate import FUNCTIONS, OPS
from headwater.pipeline.metrics.metrics import METRICS as PIPELINE_METRICS
from headwater.pipeline.sinks import sink
from headwater.pipeline.sinks.delta import delta
from headwater.pipeline.sinks.registry import KINDS, read_settings
from headwater.pipeline.sinks.sql import engine
from headwater.pipeline.sinks.sql import target as sql_target
from headwater.pipeline.spark import options
from headwater.serve.auth.gate import Access
from headwater.serve.http.handlers.streams import CLOSE, OTHER_CLOSE
from headwater.serve.http.routes import FILTERS, ROUTES, STREAM
from headwater.serve.metrics.metrics import METRICS
from headwater.serve.rpc.methods import METHODS
from headwater.settings import all_settings
from headwater.sources.sqlite.types import _EXACT, DECLARED, kind_of

SETTINGS = all_settings()

SINKS = {  # kind -> its settings, with their defaults
    "delta": {field.name: field.default for field in msgspec.structs.fields(delta.Settings)},
    "parquet": {"path": NODEFAULT, "mode": "history"},
    "sql": dict.fromkeys(KINDS["sql"].settings, NODEFAULT)
    | {"url_env": engine.URL_VARIABLE, "mode": "upsert", "lock_seconds": engine.LOCK_SECONDS},
    "kafka": dict.fromkeys(KINDS["kafka"].settings, NODEFAULT) | {"format": sink.PLAIN, "tombstones": False},
    "foreach": {"function": NODEFAULT},
}

# --- tables that mirror the code -------------------------------------------------------------------------


def test_documented_settings_equal_the_real_ones() -> None:
    documented = table(page("docs/configuration.md"), "setting", "type", "default", "environment", "meaning")
    assert documented == [
        [code(s.name), s.type, code(_shown(_default(s))), ", ".join(map(code, s.environment)), s.doc] for s in SETTINGS
    ]


def test_documented_metrics_equal_the_real_ones() -> None:
    documented = table(page("docs/operations.md"), "metric", "kind", "labels", "meaning")
    assert documented == [
        [code(name), kind, ", ".join(map(code, labels)) or "none", text]
        for name, (kind, text, labels) in METRICS.items()
    ]


def test_documented_routes_equal_the_real_ones() -> None:
    words = {Access.OPEN: "never", Access.LOCKED: "needed", Access.METRICS: "needed, unless `serve.metrics_open`"}
    documented = table(page("docs/http-api.md"), "route", "what it does", "credential")
    assert documented == [[code(f"{r.method} {r.path}"), r.summary, words[r.access]] for r in ROUTES]


def every_error(kind: type[errors.HeadwaterError] = errors.HeadwaterError) -> Iterator[type[errors.HeadwaterError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from every_error(below)


def test_documented_error_codes_equal_the_real_ones() -> None:
    documented = table(page("docs/http-api.md"), "code", "status", "retry", "meaning")
    kinds = [kind for kind in every_error() if kind.__module__ == "headwater.errors"]
    assert [row[:3] for row in documented] == [
        [code(kind.code), str(kind.status), "yes" if kind.retryable else "no"] for kind in kinds
    ]


def test_every_pipeline_error_has_a_documented_remedy() -> None:
    remedies = table(page("docs/operations.md"), "code", "what to do")
    assert [row[0] for row in remedies] == [code(kind.code) for kind in every_error(errors.PipelineError)]
    assert all(row[1] for row in remedies)


def test_documented_spark_options_equal_the_real_ones() -> None:
    documented = table(page("docs/spark.md"), "option", "value", "default", "meaning")
    defaults = {field.name: field.default for field in msgspec.structs.fields(options.Options)}
    expected = [
        [code(name), kind.words, shown(defaults[fields.split()[-1]])]
        for name, (fields, kind) in options._OPTIONS.items()
    ]
    assert [[name, value.replace("`", ""), default] for name, value, default, _ in documented] == expected


def shown(default: Any) -> str:
    if default is NODEFAULT or default in (None, "", ()):
        return ""
    return code(json.dumps(default) if isinstance(default, bool) else str(default))


def test_documented_sink_kinds_and_settings_equal_the_real_ones() -> None:
    text = page("docs/pipeline.md")
    documented = table(text, "kind", "where", "modes", "exactly once", "can be verified", "needs")
    promised = {row[0].strip("`"): row[3].startswith("yes") for row in documented}
    assert promised == {name: kind.exactly_once for name, kind in KINDS.items()}
    for kind, settings in SINKS.items():
        section = text.split(f"\n### `{kind}`\n")[1].split("\n#")[0]
        rows = {row[0].strip("`"): row[2] for row in table(section, "setting", "type", "default", "meaning")}
        assert rows == {name: shown(default) for name, default in settings.items()}, kind


@pytest.mark.parametrize("kind", SINKS)
def test_sink_with_an_unknown_setting_is_refused(kind: str) -> None:
    assert set(SINKS[kind]) == set(KINDS[kind].settings)
    with pytest.raises(errors.ConfigError, match="unknown setting of .* 'other'"):
        read_settings(kind, {"other": "x"})


def test_every_value_tag_is_documented_with_a_correct_example() -> None:
    documented = table(page("docs/http-api.md"), "tag", "example", "in `plain_json`")
    assert [row[0] for row in documented] == [code(tag) for tag in TAGS]
    for tag, example, plain in documented:
        lit = json.loads(example.strip("`"))
        assert code(lit["t"]) == tag
        if tag != "`unavailable`":
            shown = json.loads(plain.split(";")[0].strip("`"))
            assert to_plain(from_lit(lit)) == shown


def test_documented_declared_types_equal_the_real_ones() -> None:
    documented = table(page("docs/http-api.md"), "declared type", "kind", "`schema.create_table` declares")
    for types, kind, declares in documented:
        for name in re.findall(r"`([^`]+)`", types):
            assert code(kind_of(name)) == kind, name
        assert declares == (code(DECLARED[kind.strip("`")]) if kind != "`any`" else "")
    assert {kind.strip("`") for _, kind, _ in documented} == set(DECLARED)
    named = {name for types, _, _ in documented for name in re.findall(r"`([^`]+)`", types)}
    assert set(_EXACT) <= named


def test_every_operator_and_function_of_a_condition_is_documented() -> None:
    text = page("docs/http-api.md").split("## Conditions")[1]
    operators, functions = (text.split(word)[1].split(".")[0] for word in ("Operators:", "Functions:"))
    assert re.findall(r"`(\w+)`", operators) == list(OPS)
    assert re.findall(r"`(\w+)`", functions) == sorted(FUNCTIONS)


def test_every_control_event_is_documented() -> None:
    documented = table(page("docs/streams.md"), "event", "`data`", "when")
    assert [row[0] for row in documented] == [code(event) for event in ControlEvent]


def test_every_close_code_is_documented() -> None:
    documented = table(page("docs/streams.md"), "code", "word", "meaning")
    shown = {word.strip("`"): int(number) for number, word, _ in documented}
    assert shown == {**CLOSE, "an error code": OTHER_CLOSE}


def test_every_parameter_of_a_stream_is_documented() -> None:
    documented = table(page("docs/streams.md"), "parameter", "meaning")
    assert [row[0] for row in documented] == [*map(code, (*STREAM, "upto", *FILTERS))]


# --- methods ---------------------------------------------------------------------------------------------


def test_every_method_has_a_section_with_its_role_its_fields_and_an_example() -> None:
    text = "\n".join(map(page, METHOD_PAGES))
    found = re.findall(r"^### `([\w.]+)`\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL)
    sections = dict(found)
    assert len(sections) == len(found), "a method has two sections"
    assert set(sections) == set(METHODS)
    for name, section in sections.items():
        assert f"Role: {METHODS[name].role}." in section, name
        assert f'"method": "{name}"' in section, f"{name} has no example"
        for field in METHODS[name].params.__struct_fields__:
            assert re.search(rf"[`\"]{field}[`\"]", text), f"{name}: {field} is nowhere"


def test_no_page_names_an_unknown_method_setting_metric_or_variable() -> None:
    groups = {name.split(".")[0] for name in METHODS}
    rooms = {setting.name.split(".")[0] for setting in SETTINGS if "." in setting.name}
    known = {*METHODS, *(setting.name for setting in SETTINGS)} | {f"{group}.*" for group in groups}
    variables = {name for setting in SETTINGS for name in setting.environment} | {engine.URL_VARIABLE}
    for path in PAGES:
        if path.name == "features.md":
            continue  # it also names what comes later
        for name in literals(path.read_text()):
            if re.fullmatch(r"[a-z]+\.[a-z_*]+", name) and name.split(".")[0] in groups | rooms:
                assert name in known or (ROOT / name).exists() or name.endswith((".py", ".http")), (
                    f"{path.name}: {name}"
                )
            if re.fullmatch(r"headwater_[a-z_]+", name):
                known_names = {*METRICS, *PIPELINE_METRICS, sql_target.STATE_TABLE}
                assert name in known_names, f"{path.name}: {name}"
            for variable in re.findall(r"\bHEADWATER_[A-Z_]+", name):
                assert variable in variables, f"{path.name}: {variable}"


# --- the command line ------------------------------------------------------------------------------------


def verbs() -> set[str]:
    """Return every command without verbs, and every verb of the others."""
    found = set()
    for name, command in subcommands(build_parser()).items():
        inner = subcommands(command)
        found |= {f"{name} {verb}" for verb in inner} if inner else {name}
    return found


def subcommands(parser: Any) -> dict[str, Any]:
    return next((action.choices for action in parser._actions if action.dest in ("command", "verb")), {})


@pytest.mark.slow
def test_every_command_is_documented_with_an_example_and_no_unknown_command_is_named() -> None:
    text = page("docs/cli.md")
    sections = re.findall(r"^## `headwater (\w+)`$", text, re.MULTILINE)
    assert sections == list(subcommands(build_parser()))
    examples = {line for _, body in blocks(text, "sh") for line in body.splitlines()}
    for verb in verbs():
        assert any(re.match(rf"headwater {verb}\b", line) for line in examples), f"no example of {verb}"
    for path in PAGES:
        for words in re.findall(r"`headwater ([a-z]+(?: [a-z]+)?)", prose(path.read_text())):
            assert words in verbs() or words.split()[0] in {verb.split()[0] for verb in verbs()}, f"{path}: {words}"


def commands() -> list[tuple[str, str]]:
    found = [
        (path.name, line)
        for path in PAGES
        for _, body in blocks(path.read_text(), "sh")
        for line in body.replace("\\\n", " ").splitlines()
    ]
    assert found
    return found


@pytest.mark.parametrize(("name", "line"), commands())
def test_every_command_in_the_docs_is_parsed(name: str, line: str) -> None:
    program, *args = shlex.split(line.split(" < ")[0].removesuffix("&"))
    assert program in ("headwater", "curl"), f"{name}: mark blocks of other programs without `sh`"
    if program == "headwater":
        build_parser().parse_args(args)


def test_every_flag_of_serve_is_documented() -> None:
    section = page("docs/cli.md").split("## `headwater serve`")[1].split("\n## ")[0]
    flags = {name for action in subcommands(build_parser())["serve"]._actions for name in action.option_strings}
    documented = {row[0].strip("`").split()[0] for row in table(section, "flag", "meaning")}
    assert documented == {flag for flag in flags if flag.startswith("--")} - {"--help"}


def test_settings_file_of_the_docs_is_loaded(tmp_path: Path) -> None:
    from headwater.settings import load

    ((_, body),) = blocks(page("docs/configuration.md"), "toml")
    (tmp_path / "headwater.toml").write_text(body)
    config = load(file=tmp_path / "headwater.toml", environ={}, flags={})
    assert config.log.retention_age == 7 * 86400 and config.sources["sqlite"].wal


# --- features and guarantees -----------------------------------------------------------------------------


def named_tests(text: str) -> list[str]:
    return re.findall(r"`(tests/[\w/]+\.py::[\w:]+)`", text)


def test_every_feature_is_listed_once_with_its_state() -> None:
    state = r"(\w[\w-]*)"  # of each source
    rows = re.findall(rf"^\| ([FB]\d+) \| (.+?) \| {state} \| {state} \| (.*?) \|$", page("docs/features.md"), re.M)
    assert [row[0] for row in rows] == [f"F{n}" for n in range(1, 176)] + [f"B{n}" for n in range(1, 29)]
    assert {each for row in rows for each in row[2:4]} <= {"done", "partly", "later", "non-goal"}
    for number, _, *states, shown in rows:
        assert bool(named_tests(shown)) == bool({"done", "partly"} & set(states)), f"{number}: {states}, {shown}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["docs/features.md", "docs/guarantees.md"])
def test_every_test_named_in_the_docs_exists(name: str) -> None:
    named = named_tests(page(name))
    assert named
    for test in sorted(set(named)):
        file, _, inside = test.partition("::")
        assert (ROOT / file).exists(), test
        assert inside in collected(ROOT / file), f"{test} is not there"


@functools.cache
def collected(path: Path) -> set[str]:
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def test_every_guarantee_is_listed_and_those_that_hold_name_their_tests() -> None:
    rows = table(page("docs/guarantees.md"), "#", "guarantee", "today", "shown by")
    assert [row[0] for row in rows] == [str(n) for n in range(1, 13)]
    for number, _, today, shown in rows:
        assert bool(named_tests(shown)) == today.startswith(("holds", "partly")), number


# --- links and words -------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_of_a_page_have_existing_targets(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path.read_text())):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{path.name}: {target}"
        assert not anchor or anchor in anchors(there.read_text()), f"{path.name}: {target}"


def test_every_page_is_reachable_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        path = waiting.pop()
        if path in reached or path.suffix != ".md":
            continue
        reached.add(path)
        found = re.findall(r"\]\(([^)#\s]+)", prose(path.read_text()))
        waiting += [(path.parent / file).resolve() for file in found if "://" not in file]
    assert reached == set(PAGES)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_page_contains_no_private_path(path: Path) -> None:
    assert not re.search(r"/work/|/home/|/root/|/tmp/", path.read_text())
