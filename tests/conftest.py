"""Shared fixtures. The tests build tiny models and data themselves and download nothing."""

import os

# Offline, transformers does not ask the Hub about local folders that it cannot find.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A run's numbers depend on the number of threads. The models are too tiny to need several.
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
    """Restores the handlers of SIGINT and SIGHUP, which are ignored if pytest runs under `&` or nohup."""
    for number, default in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, default)


def pytest_collection_finish(session):
    """Exempts the imported libraries' objects from garbage collection, to save time."""
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
    """Makes the CPU the default device, even on a machine with a GPU."""
    PartialState(cpu=True).device = torch.device("cpu")


def save_blank(figure, target, **_):
    """Saves a single pixel or an empty SVG in place of a figure, because drawing figures takes half a second a run."""
    if Path(str(target)).suffix == ".svg":
        Path(target).write_text("<svg></svg>")
        return
    Image.new("RGB", (1, 1)).save(target, "PNG")


def hurry(patch: pytest.MonkeyPatch) -> None:
    """Speeds up runs: they draw no figures, skip `fsync`, and ask git for the commit only once."""
    commit = versions.commit
    folder = Path(versions.__file__).parent
    try:
        current_commit = commit(folder)
    except (OSError, subprocess.SubprocessError):  # not a git checkout
        current_commit = None
    patch.setattr(os, "fsync", lambda descriptor: None)
    patch.setattr(Figure, "savefig", save_blank)
    patch.setattr(plots, "plot_curves", lambda history, path, *_, **__: save_blank(None, path))
    if current_commit is not None:
        patch.setattr(versions, "commit", lambda at: current_commit if at == folder else commit(at))


@pytest.fixture(scope="session", autouse=True)
def quick_runs():
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        yield


@pytest.fixture
def drawn_figures(monkeypatch):
    """Draws real figures, for tests that inspect them."""
    monkeypatch.setattr(Figure, "savefig", SAVEFIG)
    monkeypatch.setattr(plots, "plot_curves", PLOT_CURVES)


def imported(folder: Path, name: str):
    """Imports an example's module, which imports the other files of its folder as a script does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        module = importlib.import_module(name)
    for neighbour in folder.glob("*.py"):
        sys.modules.pop(neighbour.stem, None)
    return module


def figure_of(page: str) -> str:
    """Returns the SVG element of a report that has one figure."""
    return page[page.index("<svg") : page.index("</svg>")]


def read_responses(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Returns the records of an evaluation's responses.jsonl by model and query."""
    records = read_rows(folder / "responses.jsonl")
    return {(record["model"], record["query"]): record for record in records}


class Ended(NamedTuple):
    """The exit status and the output of a command."""

    status: int
    out: str
    error: str


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a module or a script in this process, since starting Python takes seconds."""

    def run(program, *argv) -> Ended:
        monkeypatch.setattr(sys, "argv", [str(program), *map(str, argv)])
        monkeypatch.setattr("cory.process.from_command_line", False)
        # Weights & Biases replaces `sys.exit`. It would record the command's status as that of the test session.
        monkeypatch.setattr(sys, "exit", EXIT)
        capsys.readouterr()
        status = 0
        try:
            if str(program).endswith(".py"):
                monkeypatch.setattr(sys, "path", [str(Path(program).parent), *sys.path])
                runpy.run_path(str(program), run_name="__main__")
            else:
                # The messages name the program, so it runs as `__main__`.
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
        return Ended(status, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(sentences(200), vocab_size=320)


def answering(policy, tokenizer, chat_template=False, adapter=None) -> Agent:
    """Returns an agent that only answers and does not learn."""
    config = Config(model=ModelConfig(chat_template=chat_template))
    return Agent("agent_1", policy, tokenizer, config, policy.device, adapter=adapter)


def make_gpt2(tokenizer, seed: int = 0, **changes) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    settings = dict(vocab_size=len(tokenizer), n_positions=96, n_embd=32, n_layer=2, n_head=2)
    settings |= dict(bos_token_id=0, eos_token_id=0, pad_token_id=None, initializer_range=0.2)
    return GPT2LMHeadModel(GPT2Config(**(settings | changes))).eval()


@pytest.fixture(scope="session")
def policy_folder(tokenizer, tmp_path_factory) -> Path:
    """A randomly initialised GPT-2 with dropout, saved as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    make_gpt2(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_llama(tokenizer, folder: Path, width: int) -> Path:
    """Saves a randomly initialised Llama with two heads, and its tokenizer, as a Hugging Face folder."""
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
    """A random Llama whose tokenizer differs from the one in `policy_folder`."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    return save_llama(train_tokenizer(sentences(120), vocab_size=290), folder, width=32)


@pytest.fixture(scope="session")
def wide_llama(tokenizer, tmp_path_factory) -> Path:
    """A random Llama with the tokenizer of `policy_folder` and a head width that vLLM supports on a CPU."""
    return save_llama(tokenizer, tmp_path_factory.mktemp("models") / "wide", width=64)


@pytest.fixture(scope="session")
def classifier_folder(tokenizer, tmp_path_factory) -> Path:
    """A random DistilBERT with the labels NEGATIVE and POSITIVE, saved as a Hugging Face folder."""
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
    """Returns settings for a run that takes seconds: two agents that swap roles every 2 iterations, batch size 8."""
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
    """Returns settings for 6 iterations of full fine-tuning, with a checkpoint after each."""
    return replace(config, iterations=6, checkpoint=CheckpointConfig(save_every=1, keep=3))


@pytest.fixture
def one(config):
    return make_one(config)


def count_good(prompts, completions):
    return [float(completion.count("good")) + len(completion) / 50 for completion in completions]


def make_trainer(config, reward=count_good, callbacks=(), **task_options):
    """Returns a trainer on 20 short prompts with labels. The held-out set is the training set."""
    from cory.build import make_agents
    from cory.trainer import CoryTrainer

    prompts = [" ".join(text.split()[:4]) for text in sentences(20)]
    rows = Dataset.from_dict({"prompt": prompts, "label": list(range(20))})
    task = Task(rows, reward, PROMPTS, **task_options)
    held_out = rows if config.eval_every else None
    return CoryTrainer(
        config, make_agents(config), task, eval_dataset=held_out, callbacks=callbacks
    )


def run_iteration(trainer, k: int) -> list[dict]:
    """Runs iteration `k` without `train()` and returns its metrics, one record per role."""
    return trainer.iteration(k).records


def optimizer_steps(agent) -> int:
    """Returns the number of steps that the agent's Adam has taken."""
    (steps,) = {int(state["step"]) for state in agent.learner.optimizer.state.values()}
    return steps


REWARDS = """
def count_good(prompts, completions):
    return [completion.count("good") + len(completion) / 50 for completion in completions]


def calls(chains):
    return [float(len(chain)) for chain in chains]
"""


class Finished(NamedTuple):
    """A completed run with its settings and its task."""

    folder: Path
    config: Config
    task: Task


@pytest.fixture(scope="session")
def finished(policy_folder, tmp_path_factory) -> Finished:
    """A completed run of two agents for two iterations, shared by all tests; its task is read from files.

    Tests only read the run's folder or change a copy of it.
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
