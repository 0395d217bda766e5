"""The house rules, held from the first commit: imports only downwards, libraries at home, no long files."""

import ast
import functools
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "headwater"
LEVEL = {
    "errors": 0,
    "model": 1,
    "config": 1,
    "log": 2,
    "sources": 2,
    "capture": 3,
    "database": 3,
    "settings": 3,
    "feeds": 4,
    "queries": 4,
    "ranges": 4,
    "serve": 5,
    "client": 5,  # for those above; what they may import themselves is in ONLY
    "pipeline": 5,
    "app": 6,
    "worker": 6,
    "cli": 7,
    "__main__": 8,
}
ONLY = {"client": {"model", "errors"}, "pipeline": {"client", "model", "config", "errors"}}
RIGHT_OF_THE_LOG = {  # room -> what it may import of sources: the interfaces that are for it
    "feeds": {"read"},
    "queries": {"read", "query", "write"},
    "ranges": {"read"},
}
ARROW_OF_POSTGRES = {f"sources/postgres/read/{name}.py" for name in ("arrow_columns", "text_cells", "text_columns")}
HOME = {  # library -> the folders (or files) that may import it
    "apsw": {"model/work/sqlite_memory.py", "log", "sources/sqlite", "feeds", "ranges", "queries"},
    "inotify_simple": {"sources/sqlite"},
    "psycopg": {"sources/postgres", "pipeline/sinks"},
    "pymysql": {"pipeline/sinks"},
    "sqlalchemy": {"pipeline"},
    "deltalake": {"pipeline/sinks", "cli/demo/lake.py"},
    "delta": {"pipeline/sinks"},
    "httpx": {"client"},
    "pymysqlreplication": {"sources/mysql"},
    "pyspark": {"pipeline"},
    "starlette": {"serve"},
    "uvicorn": {"serve"},
    "prometheus_client": {"serve"},
    "pyarrow": {"model/arrow.py", *ARROW_OF_POSTGRES, "feeds", "serve", "ranges", "client", "pipeline"},
    "grpc": {"serve"},
    "jwt": {"serve"},
    "rich": {"cli"},
}
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}


@functools.cache
def imports(path: Path, root: Path = ROOT) -> frozenset[str]:
    """Return the absolute dotted names imported anywhere in the file."""
    package = [root.name, *path.relative_to(root).parts[:-1]]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            names |= {".".join([*base, alias.name]) for alias in node.names}
    return frozenset(names)


def offences(path: Path, root: Path = ROOT) -> list[str]:
    place = path.relative_to(root)
    room = place.parts[0].removesuffix(".py")
    found = []
    for name in sorted(imports(path, root)):
        head, *rest = name.split(".")
        homes = HOME.get(head)
        if homes and not any(str(place).startswith(home) for home in homes):
            found.append(f"{place} imports {head}; its home is {sorted(homes)}")
        if head != root.name or not rest or rest[0] == room or room == "__init__" or rest[0].startswith("__"):
            continue
        allowed = ONLY.get(room)
        down = rest[0] in allowed if allowed else LEVEL.get(rest[0], 99) < LEVEL.get(room, -1)
        if room in RIGHT_OF_THE_LOG and rest[0] == "capture":
            down = False
        if room in RIGHT_OF_THE_LOG and rest[0] == "sources" and rest[1] not in RIGHT_OF_THE_LOG[room]:
            down = False
        if not down:
            found.append(f"{place} imports {name}")
    return found


def docstring(path: Path) -> str:
    """Return the docstring of a module. Parse only its first statement: a whole file takes 30 times as long."""
    first: list[tokenize.TokenInfo] = []
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
                break
            first.append(token)
    return ast.get_docstring(ast.parse(tokenize.untokenize(first))) or "" if first else ""


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_module_imports_only_lower_levels_and_allowed_libraries(path: Path) -> None:
    assert offences(path) == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_module_has_a_docstring_and_an_allowed_name(path: Path) -> None:
    assert docstring(path), f"{path.name} has no docstring"
    assert path.stem not in BANNED_NAMES


def test_every_top_level_package_has_a_level() -> None:
    rooms = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in FILES}
    assert rooms - {"__init__"} <= set(LEVEL)


def folder_pairs() -> set[tuple[str, str]]:
    """Return the pairs of folders that import each other; a folder and the one it is in are no pair."""
    homes = {".".join([ROOT.name, *path.relative_to(ROOT).with_suffix("").parts]): path.parent for path in FILES}
    edges = set()
    for path in FILES:
        for name in imports(path, ROOT):
            home = homes.get(name) or homes.get(name.rpartition(".")[0])
            if home is not None and home not in (path.parent, *path.parents) and path.parent not in home.parents:
                edges.add((str(path.parent.relative_to(ROOT)), str(home.relative_to(ROOT))))
    return {(one, other) for one, other in edges if one < other and (other, one) in edges}


def test_no_two_folders_import_each_other() -> None:
    assert folder_pairs() == set()


def test_folder_has_at_most_its_limit_of_files() -> None:
    for folder in {path.parent for path in FILES}:
        most = 20 if folder.name == "model" else 15
        found = [path.name for path in FILES if path.parent == folder and path.name != "__init__.py"]
        assert len(found) <= most, f"{folder.relative_to(ROOT)} has {len(found)} files"


@pytest.mark.slow
def test_modules_have_no_circular_imports() -> None:
    graph = {}
    for path in FILES:
        me = ".".join([ROOT.name, *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
        graph[me] = set(imports(path, ROOT))
    modules = set(graph)

    def targets(name: str) -> set[str]:
        return {m for i in graph[name] for m in (i, i.rpartition(".")[0]) if m in modules and m != name}

    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name in done:
            return
        for target in sorted(targets(name)):
            visit(target, (*trail, name))
        done.add(name)

    for name in sorted(modules):
        visit(name, ())


def test_upward_import_is_reported(tmp_path: Path) -> None:
    root = tmp_path / "headwater"
    (root / "log").mkdir(parents=True)
    bad = root / "log" / "bad.py"
    bad.write_text("import rich\nfrom headwater.capture import follow\nfrom ..serve import http\n")
    assert len(offences(bad, root)) == 3


@pytest.mark.slow
def test_every_test_function_has_a_name_that_pytest_collects() -> None:
    for path in (Path(__file__).parent).rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.lower().startswith("test"):
                assert node.name.startswith("test_"), f"{path.name}: {node.name} is never collected"


def _names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines or imports, and those of its classes' members."""
    found = {
        node.name for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    }
    return found | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_every_class_named_in_a_sentence_exists() -> None:
    """`module.Name`, See Name and Fulfils `Name` in comments and docstrings are classes, also after renames."""
    texts = {path: path.read_text() for path in ROOT.rglob("*.py")}
    modules: dict[str, set[str]] = {}
    for path, text in texts.items():
        modules.setdefault(path.stem, set()).update(_names(ast.parse(text)))
    everywhere = set[str]().union(*modules.values())
    wrong = []
    for path, text in texts.items():
        for module, name in re.findall(r"`([a-z_]+)\.([A-Z]\w+)`", text):
            if module in modules and name not in modules[module]:
                wrong.append(f"{path.name}: {module}.{name}")
        for name in re.findall(r"(?:\b[Ss]ee|Fulfils|[Ii]mplements) `?([A-Z]\w+)(?:\.\w+)?`?[.,;)]", text):
            if name not in everywhere and name != "RFC":
                wrong.append(f"{path.name}: {name}")
    assert wrong == []
