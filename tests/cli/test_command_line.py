"""The command line as a whole: help, versions, errors in words, settings shown without secrets."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.cli_process import HEADWATER, environment, refused, run, run_json
from tests.suite.deadlines import PATIENCE

from headwater import __version__
from headwater.cli.commands.config import name_databases
from headwater.cli.failure import Failure
from headwater.cli.main import _complain, main
from headwater.cli.output.tables import plain_table, print_table, printable
from headwater.model.quantity import byte_size, counted
from headwater.settings import all_settings

SETTINGS = all_settings()


def test_version_is_printed_as_text_and_as_json() -> None:
    assert run("version").stdout == f"headwater {__version__}\n"
    assert run("--version").stdout == f"headwater {__version__}\n"
    assert run_json("version")["version"] == __version__


def test_help_lists_every_command_and_every_exit_code() -> None:
    text = run("--help").stdout
    for command in ("serve", "status", "doctor", "source", "sql", "log", "config", "demo", "version"):
        assert re.search(rf"^    {command} ", text, re.MULTILINE), command
    for code in ("0 done", "1 failed", "2 wrong usage", "3 no server"):
        assert code in text


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("nonsense",),
        ("serve", "--htt", "127.0.0.1:0"),
        ("serve", "--token", "secret"),
        ("log", "show", "--limit", "-1"),
        ("log", "show", "--after", "many"),
        ("status", "-o", "xml"),
        ("source",),
    ],
)
def test_wrong_usage_exits_with_2(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and hint.startswith("hint: headwater")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("serve", "--htpp", "1"), "error: unknown flag --htpp (did you mean --http?)\nhint: headwater serve --help\n"),
        (
            ("log", "show", "--zzz=hush"),
            "error: unknown flag --zzz\nhint: headwater log show --help\n",
        ),
        (("version", "now"), "error: unexpected argument 'now'\nhint: headwater version --help\n"),
        (("sql",), "error: the following arguments are required: STATEMENT\nhint: headwater sql --help\n"),
    ],
)
def test_wrong_usage_prints_the_nearest_flag_and_the_help_of_the_command(
    args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(args)
    assert capsys.readouterr().err == said


FREE = ("--http", "127.0.0.1:0", "--grpc", "off")  # ports that no other server on this machine has


def test_wrong_settings_exit_with_2_and_a_hint(tmp_path: Path) -> None:
    assert "HEADWATER_HTTP" in refused(2, "config", "show", env={"HEADWATER_HTPP": "x:1"})
    assert "an address" in refused(2, "serve", "--http", "nowhere", cwd=tmp_path)
    assert "HEADWATER_TOKEN" in refused(2, "serve", "--http", "0.0.0.0:0", cwd=tmp_path)
    assert "openssl" in refused(2, "serve", "--http", "0.0.0.0:0", cwd=tmp_path, env={"HEADWATER_TOKEN": "x"})
    assert "HEADWATER_TOKEN" in refused(2, "serve", "--http", "127.0.0.1:0", "--auth", cwd=tmp_path)
    assert "mysql://" in refused(2, "serve", "mysql://me:pass@host/db", *FREE, cwd=tmp_path)


def test_unusable_data_path_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file" in refused(1, "serve", "--data", str(tmp_path / "file"), *FREE)


def test_starting_the_command_line_does_not_load_the_server() -> None:
    code = "import sys, headwater.cli.main; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ("apsw", "uvicorn", "starlette", "rich", "msgspec", "asyncio", "prometheus_client")
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_command_with_a_closed_output_pipe_exits_with_0() -> None:
    process = subprocess.Popen(
        [*HEADWATER, "config", "settings"], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(PATIENCE) == 0


# --- settings --------------------------------------------------------------------------------------------


def test_config_settings_lists_every_setting() -> None:
    assert [each["name"] for each in run_json("config", "settings")] == [setting.name for setting in SETTINGS]
    text = run("config", "settings").stdout
    for setting in SETTINGS:
        assert setting.name in text and setting.environment[0] in text


def test_config_show_prints_effective_settings_and_hides_secrets(tmp_path: Path) -> None:
    file = tmp_path / "headwater.toml"
    file.write_text("[log]\nflush_ms = 7\n")
    env = {"HEADWATER_TOKEN": "hush-hush", "HEADWATER_DATA": "elsewhere"}
    shown = run_json("config", "show", "pg=postgres://me:hush-hush@host/db", "--config", str(file), env=env)
    assert (shown["log.flush_ms"], shown["data"], shown["serve.token"]) == (7, "elsewhere", "***")
    assert shown["databases"] == {"pg": "postgres://me:***@host/db"}
    assert "hush-hush" not in run("config", "show", env=env).stdout


def test_config_show_hides_secret_parameters_of_urls(tmp_path: Path) -> None:
    url = "postgresql://me@host/db?password=hush-1&sslpassword=hush-2&passfile=/x&oauth_client_secret=hush-3"
    file = tmp_path / "headwater.toml"
    file.write_text(f'[databases]\npg = "{url}"\n')
    hidden = "postgresql://me@host/db?password=***&sslpassword=***&passfile=/x&oauth_client_secret=***"
    assert run_json("config", "show", "--config", str(file))["databases"] == {"pg": hidden}
    assert "hush" not in run("config", "show", "--config", str(file)).stdout


# --- names of databases ----------------------------------------------------------------------------------


def test_single_database_is_named_main_and_several_by_their_file_names() -> None:
    assert name_databases(["shop.db"]) == {"main": "shop.db"}
    assert name_databases(["a/shop.db", "sqlite:///b/stock.v2.db"]) == {
        "shop": "a/shop.db",
        "stock": "sqlite:///b/stock.v2.db",
    }
    assert name_databases(["shop=a.db"]) == {"shop": "a.db"}
    assert name_databases(["main=a.db", "b.db"]) == {"main": "a.db", "b": "b.db"}
    assert name_databases(["./a=b.db"]) == {"main": "./a=b.db"}


@pytest.mark.parametrize("urls", [["a/x.db", "b/x.db"], ["x=a.db", "x=b.db"], ["1.db", "b.db"], ["default.db", "b.db"]])
def test_duplicate_or_invalid_database_names_are_refused(urls: list[str]) -> None:
    with pytest.raises(Failure) as failure:
        name_databases(urls)
    assert failure.value.exit_code == 2 and "NAME=" in failure.value.hint


# --- log show -------------------------------------------------------------------------------------------


def test_missing_log_is_refused_with_the_names_of_existing_logs(tmp_path: Path) -> None:
    (tmp_path / "headwater-data").mkdir()
    (tmp_path / "headwater-data" / "app.log.db").touch()
    assert refused(1, "log", "show", cwd=tmp_path).splitlines() == [
        "error: there is no log at headwater-data/main.log.db",
        "hint: There are: app. Use --db app.",
    ]
    (tmp_path / "headwater-data" / "app.log.db").unlink()
    assert "Start the server once" in refused(1, "log", "show", cwd=tmp_path)


# --- printing --------------------------------------------------------------------------------------------


def test_plain_table_is_printed_in_aligned_columns() -> None:
    assert plain_table(("a", "long"), [["xyz", ""], ["", "1"]]) == "a    long\nxyz\n     1\n"


def test_control_characters_of_a_value_are_escaped() -> None:
    assert printable("a\x1b[2J\nb é") == "a\\x1b[2J\\nb é"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_heading_with_control_characters_is_printed_escaped(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: is_terminal, raising=False)
    print_table(["a\x1b]0;x\x07", "[red]b"], [[1, 2]], out=out)
    assert "\\x1b]0;x\\x07" in out.getvalue() and "[red]b" in out.getvalue()
    assert "\x07" not in out.getvalue()


def test_error_with_control_characters_is_printed_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert _complain("two\nlines\x1b[2J", "", 1) == 1
    assert capsys.readouterr().err == "error: two\nlines\\x1b[2J\n"


def test_counts_are_printed_with_the_right_plural() -> None:
    assert [counted(n, "table") for n in (0, 1, 2000)] == ["0 tables", "1 table", "2,000 tables"]


def test_sizes_are_printed_with_units() -> None:
    assert [byte_size(n) for n in (None, 0, 999, 1000, 1_500_000)] == ["?", "0 B", "999 B", "1.0 kB", "1.5 MB"]


@pytest.mark.parametrize(
    ("args", "shown"), [(("doctor",), "\x1b[32mok"), (("config", "settings"), "─"), (("config", "show"), "─")]
)
def test_terminal_output_has_colours_and_drawn_tables(tmp_path: Path, args: tuple[str, ...], shown: str) -> None:
    ours, theirs = pty.openpty()
    env = environment(TERM="xterm-256color", COLUMNS="200")
    process = subprocess.Popen([*HEADWATER, *args], env=env, cwd=tmp_path, stdout=theirs, stdin=theirs)
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        text = b"".join(iter(lambda: read_terminal(terminal.fileno()), b"")).decode()
    assert process.wait(PATIENCE) == 0 and shown in text


def read_terminal(terminal: int) -> bytes:
    """Return available output; b"" after the end."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def test_config_json_is_a_single_document(tmp_path: Path) -> None:
    done = run("config", "show", "-o", "json", cwd=tmp_path)
    assert json.loads(done.stdout) and done.stdout.count("\n") == 1
