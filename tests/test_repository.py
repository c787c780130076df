"""The repository holds together: README, environments, documents."""

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
    """The example of "Two models, one reward"."""
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
def test_links_lead_to_files_of_the_repository(page):
    assert page.read_text().count("\n```") % 2 == 0, "a code block is not closed"
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r'<img src="([^"]+)"', text)
    for link in links:
        assert link.startswith(("http", "mailto:")) or (page.parent / link).exists(), link
        assert not link.startswith("/"), link


@pytest.mark.parametrize("script", ["configuration", "api"])
def test_written_pages_are_what_the_docstrings_say(script, command):
    ended = command(ROOT / f"docs/{script}.py", "--check")
    assert not ended.status, f"run: python docs/{script}.py\n{ended.error}"


def test_versions_agree():
    """pyproject.toml, CITATION.cff and the newest heading of CHANGELOG.md."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert project["version"] == citation["version"] == newest[1]


def test_environments_agree():
    """environment.yml, uv's pins and constraints.txt with pyproject.toml."""
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
    """The modules, and names of modules, that a file imports, wherever in it, also for type hints alone."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def imports(path: Path) -> set[str]:
    """The project's modules that a file imports, as dotted names."""
    return imported(path) & {module(each) for each in SOURCES}


def libraries(path: Path) -> set[str]:
    """The packages that a file imports."""
    return {name.split(".")[0] for name in imported(path)}


@pytest.mark.parametrize(
    "folder", ["cory", "study", "imdb_train", "gsm8k_train", "toys", "results", "tests"]
)
def test_what_is_imported_is_a_stated_dependency(folder):
    of_project = {path.stem for path in [*ROOT.glob("*"), *ROOT.glob("tests/**/*.py")]}
    packages = set().union(*(libraries(path) for path in ROOT.glob(f"{folder}/**/*.py")))
    packages -= of_project | set(sys.stdlib_module_names)
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
# From the lowest. What a file imports, directly or by way of other files, lies in its own folder or one before. A file
# of cory's top level, which has what all share as well as the method, stands above the folders that it imports.
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
    """The modules that a module imports, directly or by way of others."""
    found: set[str] = set()
    new = {name}
    while new:
        new = set().union(*(GRAPH[other] for other in new)) - found
        found |= new
    return found


def test_no_import_runs_up_and_cory_knows_no_study():
    for name in GRAPH:
        for other in reached(name):
            if folder(other) != "cory":
                assert ORDER.index(folder(other)) <= ORDER.index(folder(name)), (name, other)


def test_no_module_imports_itself_by_way_of_others():
    assert not [name for name in GRAPH if name in reached(name)]


@pytest.mark.parametrize("lower", ["cory.parallel", "cory.models", "cory.learners"])
def test_lower_folders_import_of_the_top_level_what_imports_no_folder(lower):
    for name in GRAPH:
        for other in GRAPH[name] if folder(name) == lower else ():
            if folder(other) == "cory":
                assert {folder(each) for each in reached(other)} <= {"cory"}, (name, other)


def test_what_is_in_the_wheel_imports_nothing_that_is_not():
    packages = set(PYPROJECT["tool"]["setuptools"]["packages"])
    for name in GRAPH:
        if folder(name) in packages:
            assert {folder(other) for other in GRAPH[name]} <= packages, name


def test_tests_import_nothing_from_each_other():
    """What they share is in a module that is no test."""
    for path in (ROOT / "tests").rglob("*.py"):
        assert not {name for name in libraries(path) if name.startswith("test_")}, path


def test_tasks_stand_side_by_side():
    of_gsm8k = [name for name in GRAPH if folder(name) == "gsm8k_train"]
    assert not [name for name in of_gsm8k for other in GRAPH[name] if folder(other) == "imdb_train"]


def test_no_import_cycle():
    assert not [name for name in GRAPH if name in reached(name)]


def test_few_files_touch_trl_and_peft():
    def using(library: str) -> list[str]:
        return sorted(str(path.relative_to(ROOT)) for path in SOURCES if library in libraries(path))

    assert using("trl") == ["cory/learners/ppo.py"]
    # PEFT is imported by the folder's __init__ first, which keeps bitsandbytes out.
    assert all(file.startswith(("cory/models/", "cory/learners/")) for file in using("peft"))
    assert using("bitsandbytes") == []


@pytest.mark.parametrize("name", [module(path) for path in SOURCES if ">>> " in path.read_text()])
def test_examples_in_docstrings_give_what_they_say(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
