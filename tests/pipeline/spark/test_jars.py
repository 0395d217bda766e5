"""Jars: from the folder if it is filled, else by Maven; `make` never fails without Maven."""

from pathlib import Path

import pytest

from headwater.errors import ConfigError, PipelineError
from headwater.pipeline.spark.jars import DELTA, KAFKA, PACKAGES, fetch_jars, have_jars, jar_settings, main

MVN = """#!/bin/sh
for word do case "$word" in
  -DoutputDirectory=*) folder="${word#*=}" ;;
  *pom.xml) artifact="$(sed -n 's/.*<artifactId>\\([^<]*_2.13\\)<.*/\\1/p' "$word")" ;;
esac done
mkdir -p "$folder" && touch "$folder/$artifact-9.jar" "$folder/new-thing-1.2.jar" "$folder/slf4j-api-1.7.jar"
"""
BROKEN = "#!/bin/sh\necho '[ERROR] no route to host -> [Help 1]'\nexit 1\n"


@pytest.fixture
def mvn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "mvn"
    program.parent.mkdir()
    program.write_text(MVN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return program


def test_fetched_jars_are_passed_as_files_and_missing_jars_as_packages(tmp_path: Path, mvn: Path) -> None:
    folder = tmp_path / "jars"
    fetch_jars(KAFKA, folder)
    told = jar_settings([DELTA, KAFKA], folder)
    assert told["spark.jars.packages"] == str(PACKAGES[DELTA])
    files = [Path(name) for name in told["spark.jars"].split(",")]
    assert all(file.is_absolute() and file.is_file() for file in files)
    assert {file.name for file in files} == {f"{PACKAGES[KAFKA].artifact}-9.jar", "new-thing-1.2.jar"}


def test_jars_that_spark_ships_are_not_fetched(tmp_path: Path, mvn: Path) -> None:
    fetch_jars(DELTA, tmp_path / "jars")
    assert not list((tmp_path / "jars").rglob("slf4j*"))


def test_jars_folder_with_a_relative_path_is_filled(tmp_path: Path, mvn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maven runs in the folder of the pom, and resolves paths from there."""
    mvn.write_text(MVN.replace("for word", 'cd "$(dirname "$5")"\nfor word', 1))
    monkeypatch.chdir(tmp_path)
    fetch_jars(DELTA, Path("jars"))
    assert have_jars(DELTA, tmp_path / "jars")


def test_jars_are_fetched_once_without_leftover_files(tmp_path: Path, mvn: Path) -> None:
    folder = tmp_path / "jars"
    fetch_jars(DELTA, folder)
    mvn.write_text(BROKEN)
    fetch_jars(DELTA, folder)
    assert have_jars(DELTA, folder) and not have_jars(KAFKA, folder)
    assert len(list(folder.iterdir())) == 1


def test_package_missing_from_maven_is_fetched_by_its_alternative(tmp_path: Path, mvn: Path) -> None:
    mvn.write_text('#!/bin/sh\ngrep -q token-provider "$4" || exit 1\n' + MVN.replace("artifact=", "ignored="))
    mvn.write_text(mvn.read_text().replace("$artifact-9", PACKAGES[KAFKA].artifact + "-9"))
    fetch_jars(KAFKA, tmp_path / "jars")
    assert have_jars(KAFKA, tmp_path / "jars")


def test_failed_fetch_leaves_no_files_and_reports_its_reason(tmp_path: Path, mvn: Path) -> None:
    mvn.write_text(BROKEN)
    with pytest.raises(PipelineError, match="no route to host"):
        fetch_jars(DELTA, tmp_path / "jars")
    assert not have_jars(DELTA, tmp_path / "jars") and not list((tmp_path / "jars").iterdir())


def test_make_jars_prints_a_single_line_and_never_fails(
    tmp_path: Path, mvn: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(tmp_path / "jars")
    assert capsys.readouterr().out.count("\n") == 1
    mvn.write_text(BROKEN)
    main(tmp_path / "others")
    assert "no route to host" in capsys.readouterr().out
    monkeypatch.setenv("PATH", str(tmp_path))
    main(tmp_path / "others")
    assert "mvn is not installed" in capsys.readouterr().out


def test_unknown_jar_kind_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        have_jars("dleta")
    assert "delta" in caught.value.hint
