"""The repository keeps its own rules: what style.md and the README say about the tree is checked here."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))

# Where the name of a distribution and of what one imports from it differ.
DISTRIBUTION_OF = {"yaml": "pyyaml"}

# A plugin module is imported by its host only, and a format that few people use by who reads it: what these import is
# an extra, not a requirement.
PLUGINS = {"comm": {"pytest"}, "launcher": {"pyarrow"}}

each_package = pytest.mark.parametrize("package", PACKAGES)


def describe(package: str) -> dict[str, Any]:
    """The `[project]` table of a package."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8")
    return dict(tomllib.loads(text)["project"])


def sources(package: str) -> list[Path]:
    """The modules that a package's wheel holds."""
    return sorted((ROOT / "packages" / package / "src").rglob("*.py"))


def imported_names(path: Path) -> Iterator[str]:
    """Every absolute module name that a file imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "shardweave":
            yield from (f"shardweave.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def distribution(module: str) -> str:
    """The distribution that a module name is installed with."""
    top, _, rest = module.partition(".")
    if top == "shardweave":
        return f"shardweave-{rest.partition('.')[0].replace('_', '-')}"
    return DISTRIBUTION_OF.get(top, top.replace("_", "-").lower())


def requirement_names(requirements: list[str]) -> set[str]:
    """The names in a list of requirements, without versions."""
    return {re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower() for requirement in requirements}


def public_names(package: str) -> list[str]:
    """`__all__` of a package, without its dunders."""
    module = importlib.import_module(f"shardweave.{package}")
    return [name for name in module.__all__ if not name.startswith("__")]


def test_six_packages_of_the_floor_plan() -> None:
    assert PACKAGES == ["comm", "launcher", "models", "pipeline", "tensor_parallel", "zero"]


def test_the_namespace_has_no_init_module() -> None:
    """One `shardweave/__init__.py` anywhere hides the other five packages, while mypy still says success."""
    skipped = {".nox", ".venv", ".git"}
    found = [
        path.relative_to(ROOT)
        for path in ROOT.rglob("shardweave/__init__.py*")
        if not skipped & set(path.relative_to(ROOT).parts)
    ]
    assert found == []


@each_package
def test_requirements_are_exactly_the_imports(package: str) -> None:
    own = f"shardweave-{package.replace('_', '-')}"
    imported = {distribution(name) for path in sources(package) for name in imported_names(path)}
    standard = {distribution(name) for name in sys.stdlib_module_names}
    imported -= standard | {own} | PLUGINS.get(package, set())
    assert imported == requirement_names(describe(package).get("dependencies", []))


@each_package
def test_what_a_plugin_needs_is_an_extra(package: str) -> None:
    extras = describe(package).get("optional-dependencies", {})
    offered = {name for requirements in extras.values() for name in requirement_names(requirements)}
    assert offered == PLUGINS.get(package, set())


@each_package
def test_files_every_package_has(package: str) -> None:
    folder = ROOT / "packages" / package
    source = folder / "src" / "shardweave" / package
    for path in (folder / "README.md", folder / "CHANGELOG.md", source / "py.typed", source / "__init__.py"):
        assert path.is_file(), f"{path.relative_to(ROOT)} is missing"
    assert "## Unreleased" in (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    assert list((folder / "tests").glob("test_*.py")), f"packages/{package} has no tests"


@each_package
def test_a_version_stands_in_one_place(package: str) -> None:
    line = (ROOT / f"packages/{package}/src/shardweave/{package}/_version.py").read_text(encoding="utf-8")
    match = re.fullmatch(r'__version__ = "(\d+\.\d+\.\d+)"\n', line)
    assert match, "_version.py is one line: hatchling and people edit it"
    table = describe(package)
    assert table["dynamic"] == ["version"]
    assert "version" not in table
    module = importlib.import_module(f"shardweave.{package}")
    assert module.__version__ == match[1] == metadata.version(str(table["name"]))


@each_package
def test_in_repository_requirements_admit_the_current_version(package: str) -> None:
    for requirement in describe(package).get("dependencies", []):
        match = re.fullmatch(r"shardweave-([\w-]+)>=(\d+)\.(\d+),<(\d+)\.(\d+)", requirement)
        if match is None:
            assert not requirement.startswith("shardweave-"), f"write {requirement} as >=X.Y,<X.Z"
            continue
        module = importlib.import_module(f"shardweave.{match[1].replace('-', '_')}")
        version = tuple(int(part) for part in module.__version__.split(".")[:2])
        assert (int(match[2]), int(match[3])) <= version < (int(match[4]), int(match[5]))


@each_package
def test_public_names_exist_and_are_documented(package: str) -> None:
    module = importlib.import_module(f"shardweave.{package}")
    assert inspect.getdoc(module), f"shardweave.{package} has no docstring"
    names = public_names(package)
    assert len(names) == len(set(names))
    bare = [name for name in names if not _documented(module, name)]
    assert bare == [], f"public names of shardweave.{package} without a docstring"


def _documented(module: Any, name: str) -> bool:
    value = getattr(module, name)
    if inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value):
        # An inherited docstring describes the parent, not this class.
        return bool((value.__doc__ or "").strip())
    return True  # a constant or an alias: its page in the documentation says what it is


@each_package
def test_public_names_are_in_the_documentation(package: str) -> None:
    """The page of a package shows every public name; a name that is gone fails the strict build of the site.

    A function that its module is named after is shown as `schedule.schedule`: the former alone is the module.
    """
    page = ROOT / "docs" / "packages" / f"{package}.md"
    shown = re.findall(rf"^::: shardweave\.{package}\.([\w.]+)$", page.read_text(encoding="utf-8"), re.M)
    shown = [re.sub(r"^(\w+)\.\1$", r"\1", name) for name in shown]
    assert [name for name in public_names(package) if name not in shown] == []
    assert len(shown) == len(set(shown))


@each_package
def test_every_module_says_what_it_offers(package: str) -> None:
    for path in sources(package):
        if path.name in {"_version.py", "__main__.py"}:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), f"{path.relative_to(ROOT)} has no docstring"
        assigned = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        assert "__all__" in assigned, f"{path.relative_to(ROOT)} has no __all__"


@each_package
def test_nothing_is_left_unfinished(package: str) -> None:
    """No test is switched off, and no line promises to be written later: what is open is an issue."""
    unfinished = re.compile(r"pytest\.mark\.(skip|xfail)|\bNotImplementedError\b|\b(TODO|FIXME|XXX)\b")
    for path in sorted((ROOT / "packages" / package).rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            assert not unfinished.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def test_one_module_asks_for_the_device() -> None:
    """torch names the accelerator that it was built for, also on a machine that has none: see `comm/devices.py`."""
    asks = re.compile(r"\bcurrent_accelerator\b|\baccelerator\.is_available\b")
    found = [
        path.name
        for package in PACKAGES
        for path in sources(package)
        if asks.search(path.read_text(encoding="utf-8"))
    ]
    assert found == ["devices.py"]


def test_imports_point_downwards() -> None:
    """The import-linter contract in pyproject.toml, over the installed packages."""
    command = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_package_is_known_to_the_tools() -> None:
    """mypy finds a namespace portion only when told; mkdocstrings likewise."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    folders = [f"packages/{package}/src" for package in PACKAGES]
    typed = [path.removeprefix("$MYPY_CONFIG_FILE_DIR/") for path in settings["mypy"]["mypy_path"]]
    assert sorted(typed) == folders
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [folder for folder in folders if f"- {folder}\n" not in site] == []


def test_sessions_named_in_the_readme_exist() -> None:
    """Every `nox -s NAME` in a page is a session of noxfile.py, and every session is in the README."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    sessions = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any("session" in ast.unparse(d) for d in node.decorator_list)
    }
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"nox -s ['\"]?(\w+)", text))
    assert named <= sessions
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in sorted(sessions) if not re.search(rf"`(nox -s )?{name}\b", readme)] == []


def test_every_session_is_explained_in_one_sentence() -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any(
            "session" in ast.unparse(d) for d in node.decorator_list
        ):
            docstring = ast.get_docstring(node) or ""
            assert re.fullmatch(r"[A-Z][^\n]+\.", docstring), f"session {node.name}: {docstring!r}"


def test_ci_runs_the_test_command_of_the_readme() -> None:
    command = "pip install nox && nox -s tests"
    script = ROOT / ".ci" / "run"
    assert command in script.read_text(encoding="utf-8").splitlines()
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")
    assert script.stat().st_mode & 0o111, ".ci/run is executable"


def test_nothing_lies_about_in_the_root() -> None:
    """What a session or an experiment leaves there would be committed with the next `git add`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:  # a copy without its history
        names = {path.name for path in ROOT.iterdir() if path.is_file()} - {".git"}
    else:
        names = {name for name in listed.stdout.split("\0") if name and "/" not in name}
    expected = {
        ".gitignore",
        "LICENSE",
        "README.md",
        "conftest.py",
        "constraints.txt",
        "mkdocs.yml",
        "noxfile.py",
        "pyproject.toml",
    }
    assert names <= expected
