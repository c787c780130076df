"""A hundred wrong command lines, drawn from the keys: each is answered at once, in one line that names the key.

What is not checked here needs torch, a file or the Hub, and is checked once the models and the data are loaded: the
keys in `TEXTS`, whose values may be any text when the command line is read.
"""

import random
import re
from typing import get_args, get_type_hints

import pytest
from conftest import ROOT

from cory.cli.load import load
from cory.cli.main import main
from cory.cli.messages import explained
from cory.config import Config, blocks, keys, nearest
from cory.errors import UserError
from cory.own_task import OwnConfig
from gsm8k_train.config import Gsm8kConfig
from imdb_train.config import ImdbConfig

SCRIPTS: dict[str, tuple[type[Config], str | None]] = {
    "imdb_train/cory.py": (ImdbConfig, "configs/imdb/tiny.yaml"),
    "gsm8k_train/cory.py": (Gsm8kConfig, "configs/gsm8k/tiny.yaml"),
    "-m cory.train": (OwnConfig, None),
}
TEXTS = {
    "output", "device", "callbacks", "model.name", "model.revision", "ppo.optimizer",
    "task.dataset", "task.subset", "task.split", "task.eval_dataset", "task.eval_split",
    "task.prompt_column", "task.text_column", "task.reward", "task.team_reward", "task.metrics", "task.reward_model",
    "task.pioneer_prompt", "task.observer_prompt", "task.extract",
}  # fmt: skip
UNBOUNDED = {"cory.weight"}
CONTRADICTIONS = [
    ("ppo.batch_size", "--ppo.batch_size 10 --ppo.mini_batch_size 4"),
    ("ppo.batch_size", "--algorithm grpo --ppo.batch_size 6 --ppo.mini_batch_size 6"),
    ("ppo.batch_size", "--group_size 3 --ppo.batch_size 64 --ppo.mini_batch_size 64"),
    ("group_size", "--algorithm rloo --group_size 1"),
    ("ppo.kl_in", "--algorithm ppo --ppo.kl_in loss"),
    ("ppo.reward_normalization", "--ppo.reward_normalization true"),
    ("ppo.warmup", "--iterations 5 --ppo.warmup 5"),
    ("sampling.max_new_tokens", "--sampling.min_new_tokens 9 --sampling.max_new_tokens 8"),
    ("model.quantization", "--model.quantization 4bit --lora.rank 0"),
    ("cory.exchange", "--cory.num_agents 3 --cory.chain_length 2 --cory.exchange none"),
    ("cory.credit", "--cory.credit counterfactual --cory.knowledge_transfer false"),
    ("agents", '--agents=[{"learning_rate":0.1}]'),
    ("agents[1].device", '--agents=[{"device":"cpu"},{"learning_rate":0.1}]'),
    ("branches", "--branches 2 --cory.knowledge_transfer false"),
    ("roles", '--roles=[{"name":"first"}]'),
    ("guards.patience", "--guards.patience 3 --eval_every 0"),
]


def type_of(config: type[Config], key: str) -> object:
    block, _, name = key.rpartition(".")
    return get_type_hints(blocks(config)[block] if block else config)[name]


def misspelled(rng: random.Random, key: str) -> str:
    """With a letter of its name left out, doubled, or exchanged with the next one."""
    block, dot, name = key.rpartition(".")
    at = rng.randrange(1, len(name) - 1)
    left_out = name[:at] + name[at + 1 :]
    doubled = name[:at] + name[at] + name[at:]
    exchanged = name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    return block + dot + rng.choice([left_out, doubled, exchanged])


def wrong_lines() -> list[tuple[str, list[str], str, str]]:
    """A hundred times: the script, its flags, the key that the message names, and the key that it suggests."""
    rng = random.Random(0)
    lines = [(rng.choice(list(SCRIPTS)), flags.split(), key, "") for key, flags in CONTRADICTIONS]
    of_types = ["type"] * (50 - len(CONTRADICTIONS))
    for kind in [*of_types, *["range"] * 20, *["spelling"] * 30]:
        script = rng.choice(list(SCRIPTS))
        config = SCRIPTS[script][0]
        checked = [key for key in keys(config) if key not in TEXTS]
        if kind == "type":
            key = rng.choice(checked)
            lines.append((script, [f"--{key}=[x, 3"], key, ""))
        elif kind == "range":
            numbers = [k for k in checked if k not in UNBOUNDED and _is_number(type_of(config, k))]
            key = rng.choice(numbers)
            lines.append((script, [f"--{key}=-1000000"], key, ""))
        else:
            key = rng.choice([key for key in keys(config) if len(key.rpartition(".")[2]) > 4])
            wrong = misspelled(rng, key)
            while wrong in keys(config):
                wrong = misspelled(rng, key)
            lines.append((script, [f"--{wrong}", "1"], wrong, key))
    return lines


def _is_number(hint: object) -> bool:
    return hint in (int, float) or any(_is_number(part) for part in get_args(hint))


LINES = wrong_lines()


def test_a_hundred_wrong_lines_are_drawn():
    assert len(LINES) == 100 and len({(script, *flags) for script, flags, _, _ in LINES}) > 90
    assert {flags for _, flags in CONTRADICTIONS} <= {" ".join(flags) for _, flags, _, _ in LINES}


@pytest.mark.parametrize(("script", "flags", "key", "suggested"), LINES)
def test_a_wrong_line_is_answered_in_one_line_that_names_the_key(script, flags, key, suggested):
    config, file = SCRIPTS[script]
    with pytest.raises(UserError) as error:
        load(config, ROOT / file if file else None, flags)
    message = str(error.value)
    assert "\n" not in message and len(message) < 200
    assert not any(
        word in message
        for word in ("Parser", "typing", "class '", "Errno", "Group", "unrecognized")
    )
    if suggested:
        assert message == f"unknown key {key!r}. Did you mean {suggested!r}?"
    else:
        assert message.startswith(f"{key}: expected ") and ", got " in message


@pytest.mark.parametrize(
    ("name", "hint"),
    [("prais.yaml", r"\. Did you mean 'praise\.yaml'\?"), ("other.yaml", ""), (".", "")],
)
def test_a_missing_configuration_file_is_answered_with_a_similar_one(
    tmp_path, monkeypatch, name, hint
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "praise.yaml").write_text("iterations: 2\n")
    expected = f"^config: expected an existing YAML file, got '{re.escape(name)}'{hint}$"
    with pytest.raises(UserError, match=expected):
        load(ImdbConfig, None, ["--config", name])


def test_keys_that_take_any_text_are_the_ones_that_are_exempt():
    """Their values are checked by what reads them: a model, a file, a device, a list of metrics."""
    free = set()
    known: set[str] = set()  # of scripts before, whose parsers read them alike
    for config, _ in SCRIPTS.values():
        for key in keys(config):
            if key in known and not key.startswith("task."):
                continue
            known.add(key)
            try:
                load(config, None, [f"--{key}=[x, 3"])
            except UserError:
                continue
            free.add(key)
    assert free == TEXTS


@pytest.mark.parametrize(
    ("word", "key"),
    [("learning_rate", "ppo.learning_rate"), ("learning-rate", "ppo.learning_rate"), ("Seed", "seed"),
     ("batch_size", "ppo.batch_size"), ("temperature", "sampling.temperature"), ("rank", "lora.rank"),
     ("ppo.rank", "lora.rank"), ("conf", "config"), ("zzz", None)],
)  # fmt: skip
def test_the_nearest_key(word, key):
    assert nearest(word, [*keys(ImdbConfig), "config"]) == key


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("unrecognized arguments: --querys 3", "unknown key 'querys'. Did you mean 'queries'?"),
        ("unrecognized arguments: --zzz 3", "unknown key 'zzz'. --help lists the keys"),
        ("unrecognized arguments: 3", "unexpected argument '3': expected flags such as --seed 1"),
        (
            "unrecognized arguments: seed=3",
            "unexpected argument 'seed=3'. Did you mean '--seed 3'?",
        ),
        ("argument --seed: expected one argument", "seed: expected a value, got none"),
        ("seed: expected an integer, got 'x'", "seed: expected an integer, got 'x'"),
    ],
)
def test_messages_of_the_parser_in_other_words(message, said):
    assert explained(message, ["seed", "queries"]) == said


def test_an_error_ends_a_command_with_status_2(capsys):
    def refuse():
        raise UserError("expected something else")

    with pytest.raises(SystemExit) as end:
        main(refuse)
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: expected something else\n"
