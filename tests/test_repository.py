"""The repository holds together: README, environments, documents, sizes."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = {
    name.lower().replace("_", "-"): version
    for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
}


def name_of(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement).group()


def tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True)
    return [ROOT / line for line in listed.stdout.splitlines()] or list(ROOT.glob(f"**/{pattern}"))


def test_readme_example_runs(policy_folder, tmp_path, monkeypatch):
    """The dozen lines of "Your own task", on a small model."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 16
    assert "openai-community/gpt2" in code and "iterations=20" in code
    code = code.replace("openai-community/gpt2", str(policy_folder)).replace("iterations=20", "iterations=2")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert {p.name for p in (tmp_path / "runs/cory").glob("agent_*")} == {"agent_1", "agent_2"}


def test_readme_names_every_config_and_existing_files():
    text = (ROOT / "README.md").read_text()
    for config in (ROOT / "configs").glob("*/*.yaml"):
        assert f"`{config.stem}`" in text
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (ROOT / link).exists(), link
    for module in (ROOT / "cory").glob("[a-z]*.py"):
        assert module.name in text


def test_environment_is_in_step_with_the_project():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["dependencies"][-1]["pip"] == PROJECT["dependencies"]


def test_constraints_pin_every_dependency_within_its_range():
    from packaging.requirements import Requirement

    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(CONSTRAINTS[requirement.name.lower()]), requirement
    assert CONSTRAINTS["torch"] == "2.13.0" and CONSTRAINTS["trl"] == "0.11.4"


def test_installed_versions_are_the_pinned_ones():
    from importlib.metadata import version

    for name in map(name_of, PROJECT["dependencies"]):
        assert version(name).split("+")[0] == CONSTRAINTS[name]


def test_files_stay_small():
    for path in [*ROOT.glob("cory/*.py"), *ROOT.glob("*_train/*.py")]:
        assert len(path.read_text().splitlines()) < 400, path


@pytest.mark.parametrize("pattern", ["*.py", "*.md", "*.yaml", "*.yml", "*.toml", "*.txt", "Makefile", "*.json"])
def test_nothing_names_a_machine(pattern):
    for path in tracked(pattern):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not re.search(r"(^|[^\w.])/(home|root|work|Users|tmp|mnt)/[\w.]", line), (
                f"{path.name}:{number}: {line}"
            )


def test_only_two_files_touch_trl():
    using = [p.name for p in (ROOT / "cory").glob("*.py") if re.search(r"^\s*(import|from) trl", p.read_text(), re.M)]
    assert sorted(using) == ["ppo.py", "trl_parts.py"]
