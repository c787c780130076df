"""The repository is consistent: README, environments, documents and imports."""

import ast
import doctest
import importlib
import re
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from packaging.requirements import Requirement

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
DISTRIBUTIONS = packages_distributions()
CONSTRAINTS = {
    name.lower().replace("_", "-"): version
    for name, version in re.findall(
        r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
}


def name_of(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement).group()


def test_readme_example_runs(tmp_path, monkeypatch):
    """Executes README's example in "Two models, one reward"."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    model = "imdb_train/weights/policy"
    assert model in code and "iterations=20" in code
    code = code.replace(model, str(ROOT / model)).replace("iterations=20", "iterations=2")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    agents = {path.name for path in (tmp_path / "runs/cory").glob("agent_*")}
    assert agents == {"agent_1", "agent_2"}


PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("examples/*/*.md"),
    *ROOT.glob("results/**/*.md"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_existing_files(page):
    assert page.read_text().count("\n```") % 2 == 0, "a code block is not closed"
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r'<img src="([^"]+)"', text)
    for link in links:
        assert link.startswith(("http", "mailto:")) or (page.parent / link).exists(), link
        assert not link.startswith("/"), link


@pytest.mark.parametrize("script", ["configuration", "api"])
def test_generated_pages_are_up_to_date(script, command):
    ended = command(ROOT / f"docs/{script}.py", "--check")
    assert not ended.status, f"run: python docs/{script}.py\n{ended.error}"


def test_versions_agree():
    """pyproject.toml, CITATION.cff, README and the newest heading of CHANGELOG.md state the same version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert project["version"] == citation["version"] == newest[1]
    assert f"version = {{{newest[1]}}}" in (ROOT / "README.md").read_text()


def test_environments_agree():
    """environment.yml, uv's pins and constraints.txt match pyproject.toml."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    dependencies = environment["dependencies"][-1]["pip"]
    extras = PROJECT["optional-dependencies"]
    tested = PROJECT["dependencies"] + extras["ppo"]
    assert dependencies == ["-c constraints.txt", *tested]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert PYPROJECT["tool"]["uv"]["constraint-dependencies"] == pins
    for requirement in map(Requirement, tested + extras["dev"] + extras["docs"]):
        assert requirement.specifier.contains(CONSTRAINTS[requirement.name.lower()]), requirement
    for name in map(name_of, tested):
        assert version(name).split("+")[0] == CONSTRAINTS[name]


SOURCES = [
    path
    for folder in ("cory", "study", "imdb_train", "gsm8k_train", "toys", "results")
    for path in ROOT.glob(f"{folder}/**/*.py")
]


def imported(path: Path) -> set[str]:
    """Returns all modules and names that a file imports, including imports in functions and for type hints."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def imports(path: Path) -> set[str]:
    """Returns the project's modules that a file imports, as dotted names."""
    return imported(path) & {module(source) for source in SOURCES}


def libraries(path: Path) -> set[str]:
    """Returns the packages that a file imports."""
    return {name.split(".")[0] for name in imported(path)}


@pytest.mark.parametrize(
    "folder", ["cory", "study", "imdb_train", "gsm8k_train", "toys", "results", "tests"]
)
def test_imported_packages_are_stated_dependencies(folder):
    project_modules = {path.stem for path in [*ROOT.glob("*"), *ROOT.glob("tests/**/*.py")]}
    packages = set().union(*(libraries(path) for path in ROOT.glob(f"{folder}/**/*.py")))
    packages -= project_modules | set(sys.stdlib_module_names)
    names = {DISTRIBUTIONS.get(package, [package])[0] for package in packages}

    stated = list(PROJECT["dependencies"])
    for extra, requirements in PROJECT["optional-dependencies"].items():
        if extra != "dev" or folder == "tests":
            stated += requirements
    assert {name.lower().replace("_", "-") for name in names} <= {
        name_of(requirement).lower() for requirement in stated
    }


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


GRAPH = {module(path): imports(path) for path in SOURCES}
# From the lowest folder to the highest. A file may import, directly or indirectly, from its own folder and lower ones.
# Every folder may also import the shared files in cory's top level.
ORDER = [
    "cory.parallel",
    "cory.models",
    "cory.learners",
    "cory.run",
    "cory.evaluation",
    "cory",
    "study",
    "imdb_train",
    "gsm8k_train",
    "toys",
    "results",
]


def folder(name: str) -> str:
    return max((f for f in ORDER if name == f or name.startswith(f"{f}.")), key=len)


def reached(name: str) -> set[str]:
    """Returns the modules that a module imports, directly or indirectly."""
    modules: set[str] = set()
    new = {name}
    while new:
        new = set().union(*(GRAPH[other] for other in new)) - modules
        modules |= new
    return modules


def test_no_module_imports_from_a_higher_folder():
    for name in GRAPH:
        for other in reached(name):
            if folder(other) != "cory":
                assert ORDER.index(folder(other)) <= ORDER.index(folder(name)), (name, other)


@pytest.mark.parametrize("lower", ["cory.parallel", "cory.models", "cory.learners"])
def test_lower_folders_import_only_top_level_modules_that_import_no_folder(lower):
    for name in GRAPH:
        for other in GRAPH[name] if folder(name) == lower else ():
            if folder(other) == "cory":
                assert {folder(target) for target in reached(other)} <= {"cory"}, (name, other)


def test_modules_in_the_wheel_import_only_modules_in_the_wheel():
    packages = set(PYPROJECT["tool"]["setuptools"]["packages"])
    for name in GRAPH:
        if folder(name) in packages:
            assert {folder(other) for other in GRAPH[name]} <= packages, name


def test_tests_do_not_import_each_other():
    """Shared code is in modules that are not tests."""
    for path in (ROOT / "tests").rglob("*.py"):
        assert not {name for name in libraries(path) if name.startswith("test_")}, path


def test_gsm8k_does_not_import_imdb():
    modules = [name for name in GRAPH if folder(name) == "gsm8k_train"]
    assert not [name for name in modules for other in GRAPH[name] if folder(other) == "imdb_train"]


def test_no_import_cycle():
    assert not [name for name in GRAPH if name in reached(name)]


def test_few_files_import_trl_and_peft():
    def using(library: str) -> list[str]:
        return sorted(str(path.relative_to(ROOT)) for path in SOURCES if library in libraries(path))

    assert using("trl") == ["cory/learners/ppo.py"]
    # These folders' __init__ imports PEFT first, in a way that keeps bitsandbytes out.
    assert all(file.startswith(("cory/models/", "cory/learners/")) for file in using("peft"))
    assert using("bitsandbytes") == []


@pytest.mark.parametrize("name", [module(path) for path in SOURCES if ">>> " in path.read_text()])
def test_examples_in_docstrings_are_right(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
