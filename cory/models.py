"""Loads policies, the shared reference, classifiers and tokenizers, from the Hub or from local folders."""

import copy
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cory.agent import Agent
from cory.config import Config, ModelConfig, UserError
from cory.ppo import PolicyWithValueHead
from cory.sampling import seed_everything

HUB_TIMEOUT = 5  # seconds to wait for the Hub before saying that it cannot be reached


def choose_device(name: str) -> torch.device:
    """Sets the process's device before anything else touches accelerate, and returns it.

    Raises:
        UserError: the device is unknown or absent.
    """
    try:
        wanted = None if name == "auto" else torch.device(name)
    except RuntimeError:
        raise UserError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}") from None
    if wanted is not None and wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device: expected one that this machine has, got {name!r}, and it has {torch.cuda.device_count()} GPUs"
        )
    state = PartialState(cpu=wanted is not None and wanted.type == "cpu")
    if wanted is not None and wanted.type != state.device.type:
        raise UserError(f"device: expected {state.device}, which this process uses already, got {name!r}")
    if wanted is not None and wanted.index is not None:
        state.device = wanted
    return state.device


def find(name: str, what: str, revision: str | None = None, kind: str = "model") -> dict[str, Any]:
    """Where to load `name` from, as arguments of from_pretrained: tells a missing folder from an unreachable Hub.

    Args:
        what: the key that named it, for the message.
        kind: `model` or `dataset`.

    Raises:
        UserError: no such folder, no such repository, or no answer from the Hub within a few seconds.
    """
    if Path(name).exists():
        return {"local_files_only": True}
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"{what}: expected a Hub id or an existing local folder, got {name!r}")
    advice = "Give a local folder, or run without --config for the embedded default, which needs no network."
    cached = kind == "model" and isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
    try:
        HfApi().repo_info(name, revision=revision, repo_type=kind, timeout=HUB_TIMEOUT)
    except GatedRepoError:
        raise UserError(f"{what}: {name!r} is gated. Accept its terms on the Hub, then run `hf auth login`.") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise UserError(
            f"{what}: expected a local folder or a {kind} on the Hub, and {name!r} is neither. {advice}"
        ) from None
    except Exception as error:  # the HTTP library underneath, and so its errors, differs between versions
        if cached:
            return {"local_files_only": True, "revision": revision}
        reason = str(error).split("\n")[0] or type(error).__name__
        raise UserError(f"{what}: the Hub cannot be reached to load {name!r} ({reason}). {advice}") from None
    return {"revision": revision}


def load_tokenizer(name: str, where: dict[str, Any], trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. One without a pad token pads with its end token: padding is masked everywhere."""
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **where)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(model: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal language model and its tokenizer, on the CPU; TRL's trainer moves it.

    Raises:
        UserError: the model is missing, is no causal language model, or has fewer embeddings than its tokenizer ids.
    """
    where = find(model.name, "model.name", model.revision)
    try:
        tokenizer = load_tokenizer(model.name, where, model.trust_remote_code)
        policy = AutoModelForCausalLM.from_pretrained(
            model.name, dtype=model.dtype, trust_remote_code=model.trust_remote_code, **where
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.name: expected a causal language model, got {model.name!r} ({_first_line(error)})"
        ) from None
    check_vocabulary(policy, tokenizer, "model.name", model.name)
    return policy, tokenizer


def load_classifier(name: str, label: str, what: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, int]:
    """A sequence classifier, its tokenizer, and the index of `label` (upper or lower case alike).

    Raises:
        UserError: it is missing, is no classifier, or has no such label among at least two.
    """
    where = find(name, what)
    try:
        labels = AutoConfig.from_pretrained(name, **where).id2label
        tokenizer = load_tokenizer(name, where)
        index = [i for i, text in labels.items() if text.upper() == label.upper()]
        if len(labels) < 2 or not index:
            raise UserError(
                f"{what}: expected a classifier with the label {label} among two or more, got {labels} in {name!r}"
            )
        model = AutoModelForSequenceClassification.from_pretrained(name, dtype="float32", **where)
    except (OSError, ValueError) as error:
        raise UserError(f"{what}: expected a sequence classifier, got {name!r} ({_first_line(error)})") from None
    check_vocabulary(model, tokenizer, what, name)
    return model.eval().requires_grad_(False), tokenizer, int(index[0])


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, what: str, name: str) -> None:
    """Raises a UserError where the tokenizer has ids that the model has no embedding for."""
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= rows:
        raise UserError(
            f"{what}: expected a tokenizer of at most {rows} ids, the rows of the model's embedding, "
            f"got ids up to {largest} in {name!r}"
        )


def make_agents(config: Config, num_agents: int | None = None) -> list[Agent]:
    """The agents of a run, `agent_1`, `agent_2`, ...: equal copies of the policy that share one frozen reference.

    Args:
        num_agents: how many; default `config.cory.num_agents`.

    Raises:
        UserError: the device or the model cannot be had.
    """
    choose_device(config.device)
    num_agents = config.cory.num_agents if num_agents is None else num_agents
    pi_0, tokenizer = load_policy(config.model)
    policies = [copy.deepcopy(pi_0) for _ in range(num_agents)]
    reference = PolicyWithValueHead(pi_0).requires_grad_(False).eval()
    agents = []
    for index, policy in enumerate(policies):
        seed_everything(config.seed, index)  # the value head is the only thing drawn at random
        agents.append(Agent(f"agent_{index + 1}", PolicyWithValueHead(policy), reference, tokenizer, config))
    return agents


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
