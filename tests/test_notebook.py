"""The notebook's file and its install cell. `make notebook` executes the whole notebook."""

import os
import re
import subprocess
import sys

import nbformat
import pytest
from conftest import ROOT
from IPython.core.inputtransformer2 import TransformerManager

PATH = ROOT / "notebooks/quick_start.ipynb"
NOTEBOOK = nbformat.read(PATH, as_version=nbformat.NO_CONVERT)
CELLS = {cell["id"]: cell for cell in NOTEBOOK.cells}


def test_the_notebook_is_valid_and_stored_without_outputs():
    nbformat.validate(NOTEBOOK)
    for name, cell in CELLS.items():
        outputs = cell.get("outputs") or cell.get("execution_count") or cell.metadata
        assert not outputs, name


def test_the_notebooks_links_and_files_exist():
    text = "\n".join(cell.source for cell in NOTEBOOK.cells)
    assert not re.search(r"(^|[^\w.])/(home|root|work|content|Users|tmp|mnt)\b", text, re.MULTILINE)
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        assert link.startswith("https://") or (PATH.parent / link).is_file(), link
    for file in re.findall(r'"((?:configs|examples|imdb_train)/[\w/.]+)"', text):
        assert (ROOT / file).exists(), file


def test_no_cell_swallows_an_error():
    """An error in a cell with `%%capture`, or in a command after `!`, would not stop the execution."""
    for name, cell in CELLS.items():
        if cell.cell_type == "code":
            magics = re.findall(r"^\s*(%%?\w*|!)", cell.source, re.MULTILINE)
            # The install cell itself checks what pip has installed.
            assert magics == (["%pip"] if name == "install" else []), name


class Shell:
    """A stand-in for IPython's shell that records the magics of a cell."""

    def __init__(self) -> None:
        self.magics: list[tuple[str, str]] = []

    def run_line_magic(self, name: str, arguments: str) -> None:
        self.magics.append((name, arguments))


@pytest.fixture
def install(monkeypatch):
    """Runs the install cell in a folder and returns the magics that it calls, without executing them."""

    def run(folder) -> list[tuple[str, str]]:
        shell = Shell()
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", [*sys.path])
        code = TransformerManager().transform_cell(CELLS["install"].source)
        try:
            exec(compile(code, "install", "exec"), {"get_ipython": lambda: shell})
        finally:
            run.magics = shell.magics
        return shell.magics

    return run


def test_install_keeps_fitting_packages_and_pins_the_others(install, tmp_path):
    """On Colab, for example, the installed torch fits and other packages are missing."""
    checkout = tmp_path / "cory"
    (checkout / "cory").mkdir(parents=True)
    (checkout / "cory/trainer.py").touch()
    wanted = ["torch>=2", "typing_extensions>=999", "none-such[extra]>=1"]
    (checkout / "pyproject.toml").write_text(
        f"[project]\ndependencies = {wanted[:2]}\noptional-dependencies.ppo = {wanted[2:]}\n"
    )
    (checkout / "constraints.txt").write_text(
        "# tested\ntorch==0.1\ntyping-extensions==999.0\nnone_such==1.0\nof_it==2\n"
    )
    with pytest.raises(
        RuntimeError, match=r"could not install \['none-such', 'typing-extensions'\]"
    ):
        install(tmp_path)
    assert install.magics == [("pip", "install --quiet -c runs/constraints.txt -e '.[ppo]'")]
    pins = (checkout / "runs/constraints.txt").read_text().splitlines()
    assert pins == ["# tested", "typing-extensions==999.0", "none_such==1.0", "of_it==2"]


def test_a_run_keeps_a_notebooks_figure_backend():
    """Importing the plotting code does not replace the backend that a kernel has chosen."""
    show = "import cory.run.plots, matplotlib; print(matplotlib.get_backend())"
    ran = subprocess.run(
        [sys.executable, "-c", show],
        cwd=ROOT, env=os.environ | {"MPLBACKEND": "svg"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.stdout.strip().lower() == "svg", ran.stderr
