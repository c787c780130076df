"""The repository holds together: README, environments, documents."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
CONSTRAINTS = {
    name.lower().replace("_", "-"): version
    for name, version in re.findall(
        r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
}


def name_of(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement).group()


def test_readme_example_runs(policy_folder, tmp_path, monkeypatch):
    """The example of "Your own reward", on a small model, and its evaluation, which is that of the newest run."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "openai-community/gpt2" in code and "iterations=20" in code
    code = code.replace("openai-community/gpt2", str(policy_folder)).replace(
        "iterations=20", "iterations=2"
    )
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/own_task.md").read_text().split("## From Python")[1]
    evaluation = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    for folder in ("cory", "cory-2"):
        names = {}
        exec(compile(code, "README.md", "exec"), names)
        exec(compile(evaluation, "own_task.md", "exec"), names)
        agents = {path.name for path in (tmp_path / "runs" / folder).glob("agent_*")}
        assert agents == {"agent_1", "agent_2"}
        rows = (tmp_path / f"runs/evaluation-{folder}/responses.jsonl").read_text()
        assert f'"model": "{folder}/agent_1"' in rows


PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("examples/*/*.md"),
    *ROOT.glob("results/**/*.md"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    assert page.read_text().count("\n```") % 2 == 0, "a code block is not closed"
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(
        r'<img src="([^"]+)"', text
    ):
        assert link.startswith(("http", "mailto:")) or (page.parent / link).exists(), link


def test_configuration_page_is_what_the_dataclasses_say():
    done = subprocess.run(
        [sys.executable, ROOT / "docs/configuration.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, "run: python docs/configuration.py\n" + done.stderr


def test_environment_is_in_step_with_the_project():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["dependencies"][-1]["pip"] == [
        "-c constraints.txt",
        *PROJECT["dependencies"],
    ]


def test_uv_has_the_pins_of_constraints_txt():
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert PYPROJECT["tool"]["uv"]["constraint-dependencies"] == pins


def test_constraints_pin_every_dependency_within_its_range():
    from packaging.requirements import Requirement

    extras = PROJECT["optional-dependencies"]
    wanted = PROJECT["dependencies"] + extras["dev"] + extras["docs"]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(CONSTRAINTS[requirement.name.lower()]), requirement
    assert CONSTRAINTS["torch"] == "2.13.0" and CONSTRAINTS["trl"] == "0.11.4"


def test_installed_versions_are_the_pinned_ones():
    from importlib.metadata import version

    for name in map(name_of, PROJECT["dependencies"]):
        assert version(name).split("+")[0] == CONSTRAINTS[name]


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
def test_other_pythons_are_passed_over_or_must_pass(tmp_path):
    """An interpreter that is not there, one that does not start, and one under which nothing can be installed."""
    for name, starts in ("python9.1", 1), ("python9.2", 0):
        (tmp_path / name).write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit {starts}\nexit 3\n')
        (tmp_path / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"

    def make(pythons: str) -> subprocess.CompletedProcess:
        command = ["make", "test-pythons", f"PYTHONS={pythons}"]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    passed_over = make("python9.0 python9.1")
    assert passed_over.returncode == 0
    for name in "python9.0", "python9.1":
        assert f"{name}: not found or does not start, not tested" in passed_over.stdout
    failed = make("python9.2 python9.0")
    assert failed.returncode != 0 and "failed under: python9.2\n" in failed.stdout
    assert "python9.0: not found" in failed.stdout  # the others still get their turn


SOURCES = [
    path
    for folder in ("cory", "study", "imdb_train", "gsm8k_train")
    for path in ROOT.glob(f"{folder}/**/*.py")
]


def imported(path: Path) -> set[str]:
    """The modules, and names of modules, that a file imports when it runs, wherever in it."""
    names = set()
    tree = ast.parse(path.read_text())
    for_types = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    left_out = {child for node in for_types for child in ast.walk(node)}
    for node in ast.walk(tree):
        if node in left_out:
            continue
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


@pytest.mark.parametrize("folder", ["cory", "study", "imdb_train", "gsm8k_train", "tests"])
def test_what_is_imported_is_a_stated_dependency(folder):
    from importlib.metadata import packages_distributions

    of_project = {path.stem for path in [*ROOT.glob("*"), *ROOT.glob("tests/**/*.py")]}
    packages = set().union(*(libraries(path) for path in ROOT.glob(f"{folder}/**/*.py")))
    packages -= of_project | set(sys.stdlib_module_names)
    distributions = packages_distributions()
    names = {distributions.get(package, [package])[0] for package in packages}

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
# The folders of `cory`, from the lowest. Each may import those before it; the files of `GROUND` are for everybody.
# `cory` stands for the other files of the top level.
ORDER = [
    "cory.yaml_file",
    "cory.code_files",
    "cory.command",
    "cory.identity",
    "cory.parallel",
    "cory.run",
    "cory.models",
    "cory.learners",
    "cory",
    "cory.evaluation",
    "cory.hub",
    "cory.run.measure",
    "cory.run.callbacks",
    "cory.run.trackers",
    "cory.trainer",
    "cory.train",
    "cory.chat",
    "study",
    "imdb_train",
    "gsm8k_train",
]
GROUND = {
    "cory.algorithms",
    "cory.errors",
    "cory.config",
    "cory.metrics",
    "cory.plural",
    "cory.streams",
}


def folder(name: str) -> str:
    return max((f for f in ORDER if name == f or name.startswith(f"{f}.")), key=len)


def test_no_import_runs_up_and_cory_knows_no_study():
    for name, others in GRAPH.items():
        if name == "cory":  # only offers names
            continue
        for other in others - GROUND:
            assert ORDER.index(folder(other)) <= ORDER.index(folder(name)), (
                f"{name} imports {other}"
            )
    assert not any(folder(other) == "imdb_train" for other in GRAPH["gsm8k_train.task"])


def test_the_ground_imports_nothing_above_it():
    assert GRAPH["cory.errors"] == set()
    assert GRAPH["cory.algorithms"] == set()
    assert GRAPH["cory.config"] == {"cory.algorithms", "cory.errors"}
    assert GRAPH["cory.metrics"] == {"cory.errors"}


def test_no_import_cycle():
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for other in GRAPH[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in GRAPH:
        visit(name, ())


def test_few_files_touch_trl_and_peft():
    def using(library: str) -> list[str]:
        return sorted(str(path.relative_to(ROOT)) for path in SOURCES if library in libraries(path))

    assert using("trl") == ["cory/learners/ppo.py", "cory/learners/trl_parts.py"]
    # PEFT is imported by the folder's __init__ first, which keeps bitsandbytes out.
    assert all(file.startswith(("cory/models/", "cory/learners/")) for file in using("peft"))
    assert using("bitsandbytes") == []
