"""Tiny models and data that the tests build themselves; nothing is downloaded."""

import os

# Else transformers asks the Hub about every local folder it does not find.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The models are tiny; and a run's numbers depend on its threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import importlib
import json
import runpy
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from matplotlib.figure import Figure
from PIL import Image
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from cory import identity as versions
from cory.agent import Agent
from cory.config import CheckpointConfig, Config, CoryConfig, ModelConfig, PPOConfig, SamplingConfig
from cory.roles import RolePrompts
from cory.run import plots
from cory.run.folder import read_rows
from cory.task import Task
from toys.small_models import train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
EXIT = sys.exit
SAVEFIG = Figure.savefig
PLOT_CURVES = plots.plot_curves
PROMPTS = RolePrompts(observer='Improve "{prompt}{response}": {prompt}')
WORDS = "the film was a good bad story with some very fine or awful acting and music in every single scene".split()


def pytest_configure(config):
    """Signals are heeded, also in what a script starts with `&`, or under nohup: programs inherit it."""
    for number, default in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, default)


def pytest_collection_finish(session):
    """The collector of garbage need not look again and again at what the libraries hold."""
    gc.collect()
    gc.freeze()


def sentences(n: int) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(6, 14, (n,), generator=generator).tolist()
    return [
        " ".join(WORDS[i] for i in torch.randint(len(WORDS), (m,), generator=generator).tolist())
        for m in lengths
    ]


@pytest.fixture(autouse=True)
def cpu():
    """What a test makes without naming a device is on the CPU, also where there is a GPU."""
    PartialState(cpu=True).device = torch.device("cpu")


def save_blank(figure, target, **_):
    """Saves a figure as a single pixel, or as an empty SVG: to draw those of a run takes half a second."""
    if Path(str(target)).suffix == ".svg":
        Path(target).write_text("<svg></svg>")
        return
    Image.new("RGB", (1, 1)).save(target, "PNG")


def hurry(patch: pytest.MonkeyPatch) -> None:
    """Runs draw no figure, wait for no disk, and ask git for the commit once."""
    commit = versions.commit
    folder = Path(versions.__file__).parent
    try:
        own = commit(folder)
    except (OSError, subprocess.SubprocessError):  # no checkout
        own = None
    patch.setattr(os, "fsync", lambda descriptor: None)  # no disk here loses power
    patch.setattr(Figure, "savefig", save_blank)
    patch.setattr(plots, "plot_curves", lambda history, path, *_, **__: save_blank(None, path))
    if own is not None:
        patch.setattr(versions, "commit", lambda at: own if at == folder else commit(at))


@pytest.fixture(scope="session", autouse=True)
def quick_runs():
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        yield


@pytest.fixture
def drawn_figures(monkeypatch):
    """Figures are drawn, for tests that look at them."""
    monkeypatch.setattr(Figure, "savefig", SAVEFIG)
    monkeypatch.setattr(plots, "plot_curves", PLOT_CURVES)


def imported(folder: Path, name: str):
    """A module of an example, which imports its neighbours as a script does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        module = importlib.import_module(name)
    for neighbour in folder.glob("*.py"):
        sys.modules.pop(neighbour.stem, None)
    return module


def figure_of(page: str) -> str:
    """The SVG element of a report with one figure."""
    return page[page.index("<svg") : page.index("</svg>")]


def read_responses(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The records of an evaluation's responses.jsonl, by model and query."""
    records = read_rows(folder / "responses.jsonl")
    return {(record["model"], record["query"]): record for record in records}


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    status: int
    out: str
    error: str


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a module or a script in this process, as a start of Python takes seconds."""

    def run(program, *argv) -> Ended:
        monkeypatch.setattr(sys, "argv", [str(program), *map(str, argv)])
        monkeypatch.setattr("cory.process.from_command_line", False)
        # Else Weights & Biases, where it has run, takes the status for that of the tests.
        monkeypatch.setattr(sys, "exit", EXIT)
        capsys.readouterr()
        status = 0
        try:
            if str(program).endswith(".py"):
                monkeypatch.setattr(sys, "path", [str(Path(program).parent), *sys.path])
                runpy.run_path(str(program), run_name="__main__")
            else:
                # As `__main__`, whose name the messages state.
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
        return Ended(status, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(sentences(200), vocab_size=320)


def answering(policy, tokenizer, chat_template=False, adapter=None) -> Agent:
    """An agent that does not learn."""
    config = Config(model=ModelConfig(chat_template=chat_template))
    return Agent("agent_1", policy, tokenizer, config, policy.device, adapter=adapter)


def make_gpt2(tokenizer, seed: int = 0, **changes) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    settings = dict(vocab_size=len(tokenizer), n_positions=96, n_embd=32, n_layer=2, n_head=2)
    settings |= dict(bos_token_id=0, eos_token_id=0, pad_token_id=None, initializer_range=0.2)
    return GPT2LMHeadModel(GPT2Config(**(settings | changes))).eval()


@pytest.fixture(scope="session")
def policy_folder(tokenizer, tmp_path_factory) -> Path:
    """A random GPT-2, dropout on, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    make_gpt2(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_llama(tokenizer, folder: Path, width: int) -> Path:
    """Writes a random Llama of two heads and its tokenizer as a Hugging Face folder."""
    torch.manual_seed(1)
    sizes = dict(
        hidden_size=width,
        intermediate_size=width * 3 // 2,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    ids = dict(bos_token_id=0, eos_token_id=0, initializer_range=0.2)
    settings = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **sizes, **ids)
    LlamaForCausalLM(settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory) -> Path:
    """A random Llama with a tokenizer of its own, other than that of `policy_folder`."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    return save_llama(train_tokenizer(sentences(120), vocab_size=290), folder, width=32)


@pytest.fixture(scope="session")
def wide_llama(tokenizer, tmp_path_factory) -> Path:
    """A random Llama with the tokenizer of `policy_folder`, whose heads have a width that vLLM has on a CPU."""
    return save_llama(tokenizer, tmp_path_factory.mktemp("models") / "wide", width=64)


@pytest.fixture(scope="session")
def classifier_folder(tokenizer, tmp_path_factory) -> Path:
    """A random NEGATIVE/POSITIVE DistilBERT as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("models") / "distilbert"
    torch.manual_seed(0)
    settings = DistilBertConfig(
        vocab_size=len(tokenizer), max_position_embeddings=96, dim=16, hidden_dim=32, n_layers=1, n_heads=2,
        id2label={0: "NEGATIVE", 1: "POSITIVE"}, label2id={"NEGATIVE": 0, "POSITIVE": 1}, initializer_range=0.5,
    )  # fmt: skip
    DistilBertForSequenceClassification(settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reviews(tmp_path_factory) -> Path:
    """A folder with train.jsonl and test.jsonl of nonsense reviews."""
    folder = tmp_path_factory.mktemp("reviews")
    rows = sentences(60)
    for split, part in (("train", rows[:40]), ("test", rows[40:])):
        (folder / f"{split}.jsonl").write_text(
            "".join(json.dumps({"text": row}) + "\n" for row in part)
        )
    return folder


def make_config(policy_folder: Path, folder: Path) -> Config:
    """A run of seconds: two agents, a batch of 8, an exchange every 2 iterations."""
    return Config(
        iterations=4,
        output=str(folder / "run"),
        device="cpu",
        sample_every=2,
        model=ModelConfig(name=str(policy_folder)),
        cory=CoryConfig(exchange_period=2),
        ppo=PPOConfig(learning_rate=1e-3, batch_size=8, mini_batch_size=8),
        sampling=SamplingConfig(min_new_tokens=3, max_new_tokens=6),
    )


@pytest.fixture
def config(policy_folder, tmp_path) -> Config:
    return make_config(policy_folder, tmp_path)


def make_one(config):
    """A full fine-tuning run of 6 iterations with a checkpoint after each."""
    return replace(config, iterations=6, checkpoint=CheckpointConfig(save_every=1, keep=3))


@pytest.fixture
def one(config):
    return make_one(config)


def count_good(prompts, completions):
    return [float(completion.count("good")) + len(completion) / 50 for completion in completions]


def make_trainer(config, reward=count_good, callbacks=(), **of_task):
    """A trainer on 20 short prompts, each with a label; the held-out rows are the same."""
    from cory.build import make_agents
    from cory.trainer import CoryTrainer

    prompts = [" ".join(text.split()[:4]) for text in sentences(20)]
    rows = Dataset.from_dict({"prompt": prompts, "label": list(range(20))})
    task = Task(rows, reward, PROMPTS, **of_task)
    held_out = rows if config.eval_every else None
    return CoryTrainer(
        config, make_agents(config), task, eval_dataset=held_out, callbacks=callbacks
    )


def run_iteration(trainer, k: int) -> list[dict]:
    """Runs iteration `k` outside of `train`; its metrics, a record per role."""
    return trainer.iteration(k).records


def optimizer_steps(agent) -> int:
    """How many steps Adam has made."""
    (steps,) = {int(state["step"]) for state in agent.learner.optimizer.state.values()}
    return steps


REWARDS = """
def count_good(prompts, completions):
    return [completion.count("good") + len(completion) / 50 for completion in completions]


def calls(chains):
    return [float(len(chain)) for chain in chains]
"""


class Finished(NamedTuple):
    """A run that has ended, with its settings and its task."""

    folder: Path
    config: Config
    task: Task


@pytest.fixture(scope="session")
def finished(policy_folder, tmp_path_factory) -> Finished:
    """One run of two iterations for all tests that need one: two agents, a task of its own from files.

    Tests only read its folder, or change a copy.
    """
    from cory.build import make_agents
    from cory.own_task import OwnConfig, OwnTaskConfig, make_task
    from cory.trainer import CoryTrainer

    folder = tmp_path_factory.mktemp("finished")
    (folder / "rewards.py").write_text(REWARDS)
    rows = [json.dumps({"prompt": text}) + "\n" for text in sentences(16)]
    (folder / "rows.jsonl").write_text("".join(rows))
    task = OwnTaskConfig(
        dataset=str(folder / "rows.jsonl"),
        reward=f"{folder}/rewards.py:count_good",
        team_reward=f"{folder}/rewards.py:calls",
        observer_prompt='Improve "{prompt}{response}": {prompt}',
    )
    changes = {"iterations": 2, "sample_every": 1, "task": task}
    config = OwnConfig(**{**vars(make_config(policy_folder, folder)), **changes})
    config.checkpoint.save_every = 1
    trainer = CoryTrainer(config, make_agents(config), make_task(config))
    return Finished(trainer.train().folder, config, trainer.task)
