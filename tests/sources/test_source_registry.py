"""The registry of sources: a source of its own package is a folder and a line."""

from pathlib import Path

import pytest
from tests.conformance.live_server import Live

from headwater.errors import ConfigError
from headwater.settings import all_settings, load
from headwater.sources import registry
from headwater.sources.registry import RegistryEntry

KIND = '''
from dataclasses import dataclass

from headwater.config.setting_types import integer, setting
from headwater.model.change import Change, Op
from headwater.model.table import Column, Table
from tests.sources.memory_source import MemorySource
from headwater.sources.registry import SourceKind


@dataclass(frozen=True)
class ToySettings:
    """The toy source."""

    rows: int = setting(1, integer(1), "rows that the table begins with")
    on_discontinuity: str = "stop"


class ToyKind(SourceKind):
    """Tables that exist while the server runs."""

    settings = ToySettings

    def open(self, name, url, *, notes, settings, folder, is_embedded):
        table = Table(url.removeprefix("toy://"), (Column("id", "i64"),), ("id",))
        source = MemorySource(name, table)
        for number in range(settings.rows):
            source.commit(Change(Op.INSERT, table, after=(number,)))
        return source


KIND = ToyKind()
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_source").mkdir()
    (tmp_path / "toy_source" / "kind.py").write_text(KIND)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry.KINDS, "toy", RegistryEntry(("toy://",), "toy_source.kind", "toy://…"))


@pytest.mark.usefixtures("toy")
def test_source_of_another_package_is_served_with_its_own_settings(tmp_path: Path) -> None:
    file = tmp_path / "headwater.toml"
    file.write_text('serve.http = "127.0.0.1:0"\ntoy.rows = 3\ndatabases.main = "toy://ticks"\n')
    assert "toy.rows" in {setting.name for setting in all_settings()}
    live = Live(tmp_path, config=load(file=file, environ={}, flags={"data": str(tmp_path / "data")}))
    try:
        changes = live.changes(live.subscribe("ticks", start="earliest", include={"after": True}))
        assert [change["after"]["id"] for change in changes] == [0, 1, 2]
        assert live.error("sql.exec", sql="SELECT 1")["code"] == "not_supported"
    finally:
        live.stop()


def test_url_of_an_unknown_scheme_is_refused_with_the_known_schemes() -> None:
    with pytest.raises(ConfigError) as found:
        registry.kind_name("mysql://me:secret@host/db")
    assert "mysql://" in found.value.message and "postgresql://" in found.value.hint
    assert "secret" not in found.value.message + found.value.hint


@pytest.mark.parametrize("url", ["app.db", "/a/b.db", "sqlite:app.db", "sqlite:///a/b.db", ""])
def test_path_is_a_sqlite_file(url: str) -> None:
    assert registry.kind_name(url) == "sqlite"
