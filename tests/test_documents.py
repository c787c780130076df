"""Commands and Python code in README and docs work as the pages say.

docs/own_task.md is executed from an empty folder to a report, and tests/test_repository.py executes README's example.
For all other commands, the programs only parse the arguments: files, keys and values must exist, and the settings must
fit the number of processes.
"""

import io
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from cory.command import load
from cory.errors import UserError
from cory.evaluation.command import parse_settings
from cory.parallel import distributed
from cory.run.folder import read_rows
from gsm8k_train.config import GSM8K, Gsm8kConfig
from imdb_train.config import IMDB, ImdbConfig
from study.experiment import command_line as experiment
from study.tables import FROZEN

PAGES = [
    ROOT / "README.md",
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("results/*/README.md"),
    ROOT / "results/README.md",
]
TRAINING = {
    f"{task}_train/{script}.py": (config, ROOT / f"configs/{task}/tiny.yaml")
    for task, config in (("imdb", ImdbConfig), ("gsm8k", Gsm8kConfig))
    for script in ("cory", "ppo")
}
EVALUATION = {
    "imdb_train/evaluate.py": IMDB,
    "gsm8k_train/evaluate.py": GSM8K,
}
RUNS = {
    "runs/a": "imdb",
    "runs/imdb_cory_tiny": "imdb",
    "runs/imdb_ppo_tiny": "imdb",
    "runs/gsm8k_cory_tiny": "gsm8k",
}
PLACEHOLDER = re.compile(r"path/to|FOLDER|CHECKOUT|my\.yaml|praise|RUN\b|FILE|NAME")


def commands() -> list[tuple[str, str]]:
    """Returns (page, command line) of all commands with python, torchrun or accelerate, without comments."""
    commands_found = []
    for page in PAGES:
        text = page.read_text()
        if FROZEN.search(text):  # the page's commands belong to an older commit
            continue
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"\s+#.*", "", line).strip()
                if line.startswith(("python ", "torchrun ", "accelerate ")) and "<<" not in line:
                    commands_found.append((str(page.relative_to(ROOT)), line))
    for page in ROOT.glob("configs/accelerate/*.yaml"):
        text = page.read_text().replace("\\\n#", " ")
        commands_found += [
            (str(page.relative_to(ROOT)), line)
            for line in re.findall(r"^# +(accelerate .*)", text, re.MULTILINE)
        ]
    return commands_found


def processes_of(words: list[str]) -> int:
    """Returns the number of processes that a launcher's command starts on all machines."""
    if words[0] == "accelerate":
        return yaml.safe_load((ROOT / words[words.index("--config_file") + 1]).read_text())[
            "num_processes"
        ]
    sizes = [
        int(words[words.index(name) + 1])
        for name in ("--nnodes", "--nproc_per_node")
        if name in words
    ]
    return math.prod(sizes)


@cache
def help_of(program: str) -> str:
    """Returns the output of a module or script with --help."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(sys, "argv", [program, "--help"])
        patch.setattr("cory.process.from_command_line", False)
        with suppress(SystemExit):
            if program.endswith(".py"):
                runpy.run_path(str(ROOT / program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
    return printed.getvalue()


def check_flags(program: str, argv: list[str]) -> None:
    """Asserts that a program's help names all flags of a command."""
    documented = set(re.findall(r"--[\w-]+", help_of(program)))
    flags = {word.split("=")[0] for word in argv if word.startswith("--")}
    assert flags <= documented | {"--help"}, flags - documented


@pytest.mark.parametrize("page, line", commands())
def test_documented_commands_are_valid(page, line, tmp_path, monkeypatch, capsys):
    words, count = shlex.split(line), 1
    if words[0] != "python":  # a launcher with options, then a script or -m
        script = next(i for i, word in enumerate(words) if word.endswith(".py") or word == "-m")
        files = [word for word in words[:script] if word.startswith("configs/")]
        assert all((ROOT / file).exists() for file in files)
        count, words = processes_of(words), ["python", *words[script:]]
    if words[1] == "-m":
        module = ROOT / words[2].replace(".", "/")
        exists = module.with_suffix(".py").exists() or (module / "__main__.py").exists()
        assert exists or words[2] == "venv", line
        if words[2] not in ("venv", "cory.train", "http.server"):
            check_flags(words[2], words[3:])
        if words[2] == "study.experiment" and not PLACEHOLDER.search(words[3]):
            monkeypatch.chdir(ROOT)
            try:
                experiment([*words[3:], "--dry-run", "--runs", str(tmp_path)])
            except UserError as error:
                if "got 'examples/" in str(error):
                    pytest.skip("the example's data have not been made")
                raise
            out = capsys.readouterr().out
            # The output lists the runs to make, or the results of all runs are stored already.
            assert "--config" in out or " 0 to make" in out
        return
    script, argv = words[1], words[2:]
    if script == "-c":
        compile(argv[0], line, "exec")
        return
    assert (ROOT / script).exists(), line
    if "--help" in argv or script not in TRAINING:
        if script in EVALUATION:
            assert parse_settings(EVALUATION[script], None, argv).models
        elif "--help" not in argv:
            check_flags(script, argv)
        return
    for run, task in RUNS.items():  # runs that earlier commands of a page have trained
        (tmp_path / run / "checkpoints/iter-000090").mkdir(parents=True)
        shutil.copy(ROOT / f"configs/{task}/tiny.yaml", tmp_path / run / "config.yaml")
    argv = [word for word in argv if word not in ("RUN", "--print_config")]
    argv = [str(ROOT / word) if word.startswith("configs/") else word for word in argv]
    monkeypatch.chdir(tmp_path)
    config = load(*TRAINING[script], argv, single_agent=script.endswith("ppo.py"))
    assert config.iterations > 0
    if count > 1:
        monkeypatch.setattr(distributed, "world_size", lambda: count)
        distributed.check(config)


def test_all_commands_of_own_task_md_run(tmp_path, monkeypatch, command):
    """The page is executed up to its section on callbacks, with fewer iterations and responses."""
    page = (ROOT / "docs/own_task.md").read_text().split("## Callbacks")[0]
    script = "\n".join(re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    script = (
        script.replace("CHECKOUT", str(ROOT))
        .replace("iterations: 20", "iterations: 2")
        .replace("--samples 8", "--samples 1")
    )
    start = "mkdir praise && cd praise\n"
    assert script.startswith(start)
    (tmp_path / "praise").mkdir()
    monkeypatch.chdir(tmp_path / "praise")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    printed = ""
    # The project's commands run in this process, all other lines in a shell.
    for part in re.split(r"^(python -m .*)\n", script.removeprefix(start), flags=re.MULTILINE):
        if part.startswith("python -m "):
            ended = command(*shlex.split(part, comments=True)[2:])
            assert ended.status == 0, part + ended.out + ended.error
            printed += ended.out + ended.error
        else:
            subprocess.run(["bash", "-ec", part], env=os.environ | {"PATH": path}, check=True)
    rows = [
        "praise/agent_2 after agent_1",
        "praise_ppo/agent_1 after itself",
        "roles/agent_3 after agent_2 after agent_1",
        "frozen/agent_2 after agent_1",
        "branches/agent_2",
    ]
    assert all(row in printed for row in rows)
    runs = tmp_path / "praise/runs"
    assert (runs / "evaluation-praise-praise_ppo/evaluation.json").exists()
    roles = {row["role"] for row in read_rows(runs / "roles/metrics.jsonl")}
    assert roles == {"writer", "doubter", "closer"}
    samples = read_rows(runs / "roles_ppo/samples.jsonl")
    assert all(row["prompt"] == row["query"] for row in samples)  # the baseline reads the query
    frozen = read_rows(runs / "frozen/metrics.jsonl")[2:]
    assert [(row["agent"], row["kl"] == 0) for row in frozen] == [
        ("agent_1", False),
        ("agent_2", True),
    ]


def test_layout_md_names_every_code_file_and_no_deleted_one():
    block = (ROOT / "docs/layout.md").read_text().split("```")[1]
    named = set(re.findall(r"[\w-]+(?:\.md)?\.(?:py|html|css|js|jinja|ipynb)\b", block))
    folders = (
        "cory",
        "study",
        "imdb_train",
        "gsm8k_train",
        "toys",
        "results",
        "benchmarks",
        "docs",
    )
    folders += ("notebooks",)
    files = {path.name for folder in folders for path in (ROOT / folder).rglob("*.*")}
    code = {name for name in files if name.endswith(".py") and not name.startswith("__")}
    assert named - files == set()
    assert code - named == set()
