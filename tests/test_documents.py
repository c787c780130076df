"""Commands and Python that README and docs show do what the pages say.

Executed: a first task of one's own (docs/own_task.md, from an empty folder to a report), and README's example
(tests/test_repository.py). All other commands are read by the programs: files, keys and values must be right, and so
many processes must be able to share the settings.
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
    """Every command line that starts with python, torchrun or accelerate launch, without its comment, with its page."""
    found = []
    for page in PAGES:
        text = page.read_text()
        if FROZEN.search(text):  # its commands are those of another commit
            continue
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"\s+#.*", "", line).strip()
                if line.startswith(("python ", "torchrun ", "accelerate ")) and "<<" not in line:
                    found.append((str(page.relative_to(ROOT)), line))
    for page in ROOT.glob("configs/accelerate/*.yaml"):
        text = page.read_text().replace("\\\n#", " ")
        found += [
            (str(page.relative_to(ROOT)), line)
            for line in re.findall(r"^# +(accelerate .*)", text, re.MULTILINE)
        ]
    return found


def processes_of(words: list[str]) -> int:
    """The processes that a launcher's command starts on all machines."""
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
    """What a module's or a script's --help prints."""
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
    """Each flag of a command is one that its help names."""
    known = set(re.findall(r"--[\w-]+", help_of(program)))
    flags = {word.split("=")[0] for word in argv if word.startswith("--")}
    assert flags <= known | {"--help"}, flags - known


@pytest.mark.parametrize("page, line", commands())
def test_documented_commands_are_read(page, line, tmp_path, monkeypatch, capsys):
    words, count = shlex.split(line), 1
    if words[0] != "python":  # a launcher, its options, then a script or -m
        script = next(i for i, word in enumerate(words) if word.endswith(".py") or word == "-m")
        files = [word for word in words[:script] if word.startswith("configs/")]
        assert all((ROOT / file).exists() for file in files)
        count, words = processes_of(words), ["python", *words[script:]]
    if words[1] == "-m":
        module = ROOT / words[2].replace(".", "/")
        there = module.with_suffix(".py").exists() or (module / "__main__.py").exists()
        assert there or words[2] == "venv", line
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
            assert "--config" in out or " 0 to make" in out  # all rows are there
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
    for run, task in RUNS.items():  # runs that the page trains before
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


def test_a_first_task_of_ones_own_as_the_page_says(tmp_path, monkeypatch, command):
    """docs/own_task.md from its first to its last command, with fewer iterations and responses."""
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
    # The project's commands run in this process, what is between them in a shell.
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
    assert all(row["prompt"] == row["query"] for row in samples)  # what the baseline reads
    frozen = read_rows(runs / "frozen/metrics.jsonl")[2:]
    assert [(row["agent"], row["kl"] == 0) for row in frozen] == [
        ("agent_1", False),
        ("agent_2", True),
    ]


def test_the_layout_names_every_file_of_code_and_none_that_is_gone():
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
