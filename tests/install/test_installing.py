"""The wheel that pyproject.toml describes contains everything that a run needs."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT

from cory.command import load
from cory.errors import UserError
from imdb_train.config import ImdbConfig

SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
TOP = ("cory", "study", "imdb_train", "gsm8k_train")


def source(package: str) -> Path:
    """Returns a package's folder in the checkout."""
    return ROOT / SETUPTOOLS["package-dir"].get(package, package.replace(".", "/"))


def in_wheel() -> dict[Path, Path]:
    """Maps each file of the wheel, as a relative path, to its source in the checkout."""
    files = {}
    for package in SETUPTOOLS["packages"]:
        for pattern in ["*.py", *SETUPTOOLS["package-data"].get(package, [])]:
            for file in source(package).glob(pattern):
                inside = Path(package.replace(".", "/")) / file.relative_to(source(package))
                files[inside] = file
    return files


def test_the_wheel_has_exactly_the_packages_and_their_configurations():
    tracked = subprocess.run(
        ["git", "ls-files", "-z", *TOP, "configs/imdb", "configs/gsm8k"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    names = set(tracked.stdout.strip("\0").split("\0"))
    expected = {ROOT / name for name in names if (ROOT / name).exists()}
    assert expected <= set(in_wheel().values())
    assert {path.parts[0] for path in in_wheel()} == set(TOP)


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory) -> Path:
    """A folder with the wheel's unpacked files."""
    folder = tmp_path_factory.mktemp("installed")
    for path, file in in_wheel().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / path)
    return folder


EVERYTHING = """
import importlib, pkgutil, runpy
import cory, gsm8k_train, imdb_train, study

for package in (cory, gsm8k_train, imdb_train, study):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
for name in cory.__all__:
    getattr(cory, name)
runpy.run_module("imdb_train.cory", run_name="__main__", alter_sys=True)
"""


def test_an_installed_package_trains_in_an_empty_folder(site_packages, tmp_path):
    """All modules can be imported. Output into a pipe has no progress bar and no control characters."""
    (tmp_path / "everything.py").write_text(EVERYTHING)
    before = {file: file.stat().st_mtime_ns for file in site_packages.rglob("*")}
    # With this seed, no guard flags the iteration, although it has only 8 responses.
    sizes = ["--ppo.batch_size=8", "--ppo.mini_batch_size=8", "--iterations=1", "--seed=1"]
    variables = {"PYTHONPATH": str(site_packages), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "everything", *sizes],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not re.search(r"[\r\x1b]|it/s", done.stdout + done.stderr)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("imdb_cory_tiny")
    assert {"agent_1", "agent_2", "report.html", "curves.png"} <= {p.name for p in folder.iterdir()}
    assert (folder / "checkpoints/iter-000001/state.json").exists()
    assert json.loads((folder / "summary.json").read_text())["peak_memory_mb"] > 100
    assert {file: file.stat().st_mtime_ns for file in site_packages.rglob("*")} == before


def test_a_file_of_the_current_folder_comes_before_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["--config=configs/imdb/tiny.yaml"]
    assert load(ImdbConfig, None, argv).model.name == "tiny"
    (tmp_path / "configs/imdb").mkdir(parents=True)
    (tmp_path / "configs/imdb/tiny.yaml").write_text("iterations: 7\n")
    assert load(ImdbConfig, None, argv).iterations == 7
    argv = ["--config", "configs/imdb/none.yaml"]
    with pytest.raises(UserError, match=r"^config: "):
        load(ImdbConfig, None, argv)
