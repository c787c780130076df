"""Answers every query with every model and chain, and measures the responses' rewards and their KL to a base model.

In a chain, models answer one after the other and read the earlier answers.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cory.agent import Agent
from cory.chain import Chain
from cory.checks import check_answer
from cory.config import Config, EvaluationConfig, SamplingConfig
from cory.errors import UserError
from cory.evaluation.rows import Lineup, ModelSource, Row, same_weights
from cory.identity import is_adapter
from cory.learners.losses import TokenLogprobs
from cory.learners.memory import LARGEST, rows_within
from cory.metrics import full_kl
from cory.models.load import adapter_tokenizer, attach, load_answering
from cory.models.prefixes import response_logits
from cory.models.text import pad_token
from cory.parallel.devices import autocast, to_device
from cory.rewards import Scores, score_chains, score_rollouts
from cory.roles import Prompt
from cory.rollout import Batch, Rollout, joined, repeated
from cory.streams import Purpose, Stream

Record = dict[str, Any]  # a line of responses.jsonl
LoadedModel: TypeAlias = tuple[PreTrainedModel, PreTrainedTokenizerBase]


# An agent and its answers


class Divergence(NamedTuple):
    """Divergence of an agent from its base model on one response, in nats.

    Args:
        kl: the full KL, summed over the response's tokens; it has less variance than the sampled KL.
        sampled_kl: the response's log-probability under the agent, minus its log-probability under the base.
        base_nll: the response's negative log-likelihood under the base.
    """

    kl: float
    sampled_kl: float
    base_nll: float


@torch.no_grad()
def respond(
    agent: Agent,
    base: PreTrainedModel | None,
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    seed: int = 0,
    batch_size: int = 64,
) -> tuple[Rollout, list[Divergence]]:
    """Samples one response per prompt, in batches of similar length. Returns them with their divergences from the base.

    Args:
        base: the base model, with the same tokens as the agent. None: the agent's policy without its adapter.
        batch_size: prompts at a time; fewer if their logits (prompts, max_new_tokens, vocabulary) exceed `LARGEST`.

    Raises a UserError: a prompt is too long for the model, or a probability is not finite.
    """
    lengths = [len(ids) for ids in agent.encode_checked(prompts, sampling.max_new_tokens)]
    rows = rows_within(LARGEST, agent.device, agent.policy, sampling.max_new_tokens)
    size = min(batch_size, rows)
    generator = Stream(seed, Purpose.EVALUATION).torch()
    order = sorted(range(len(prompts)), key=lambda row: lengths[row])
    rollouts = []
    divergences: list[Divergence] = []
    for start in range(0, len(order), size):
        batch = [prompts[row] for row in order[start : start + size]]
        rollout = agent.respond(batch, sampling, generator, keep_logits=True)
        divergences += _compare_with_base(agent, base, rollout, sampling.temperature)
        rollouts.append(replace(rollout, logits=[]))
        del rollout  # frees its logits before the next batch needs the memory
    positions = sorted(range(len(order)), key=order.__getitem__)
    return joined(rollouts, positions), [divergences[position] for position in positions]


def _compare_with_base(
    agent: Agent, base: PreTrainedModel | None, rollout: Rollout, temperature: float
) -> list[Divergence]:
    """Compares agent and base at the temperature at which the responses were sampled."""
    base_logits = None
    if base is not agent.policy:
        without_adapter = agent.policy.disable_adapter() if base is None else nullcontext()
        with autocast(agent.device, agent.config.precision), without_adapter:
            base_logits = response_logits(
                base or agent.policy,
                rollout.prompt_ids,
                rollout.response_ids,
                pad_token(agent.tokenizer),
            )
    numbers = []
    # One response at a time: a response's logits fit in a processor's cache, the batch's logits do not.
    for row, response in enumerate(rollout.response_ids):
        logits = torch.stack(rollout.logits[row]).float()
        ids = to_device(response, logits.device)
        logprobs, all_logprobs = TokenLogprobs.apply(logits, ids, temperature)
        base_logprobs, all_base_logprobs = logprobs, all_logprobs
        if base_logits is not None:
            row_base_logits = base_logits[row, : len(response)].float()
            base_logprobs, all_base_logprobs = TokenLogprobs.apply(
                row_base_logits, ids, temperature
            )
        kl = full_kl(all_logprobs, all_base_logprobs).sum()
        sampled_kl = (logprobs - base_logprobs).sum()
        numbers.append(torch.stack([kl, sampled_kl, -base_logprobs.sum()]))
    # All numbers leave the device in one transfer, so that the program waits only once per batch.
    divergences = [Divergence(*row) for row in torch.stack(numbers).cpu().tolist()]
    for prompt, divergence in zip(rollout.prompts, divergences, strict=True):
        if not math.isfinite(divergence.kl):
            raise UserError(
                f"expected finite probabilities, got a KL of {divergence.kl} between {agent.policy.name_or_path!r} and "
                f"its base, for the prompt {prompt!r}"
            )
    return divergences


def load_agent(
    source: ModelSource, device: torch.device, config: Config, date: str | None = None
) -> tuple[Agent, PreTrainedModel | None]:
    """Loads an agent, and the base model to which its KL is measured (see `respond`).

    Args:
        config: the agent's settings; its model is `source.model`.
        date: the date shown by chat templates that print one. None: today's.

    Raises a UserError if a model cannot be loaded, or if the tokens of agent and base differ.
    """
    # A run that starts from an adapter merges it into its model and trains a new adapter on the merged model.
    policy, tokenizer = load_answering(source.model, device, merge=source.adapter is not None)
    base: PreTrainedModel | None = policy
    if source.adapter is not None:
        policy = attach(policy, source.adapter).eval()
        tokenizer = adapter_tokenizer(source.adapter, policy, tokenizer)
        base = None
    if not same_weights(source.model, source.base):
        base, base_tokenizer = load_answering(source.base, device)
        _check_tokens(source, (policy, tokenizer), (base, base_tokenizer))
    config = replace(config, model=source.model)
    has_adapter = source.adapter is not None or is_adapter(Path(source.model.name))
    adapter = "default" if has_adapter else None  # PEFT's name for a loaded adapter
    agent = Agent(source.model.name, policy, tokenizer, config, device, adapter=adapter)
    agent.date = date or agent.date
    return agent, base


def _check_tokens(source: ModelSource, model: LoadedModel, base: LoadedModel) -> None:
    """Raises a UserError if a model and its base have different tokens: a KL between them would mean nothing.

    Two differences are allowed: the ids of added tokens, such as chat markers, and ids that only one model has.
    """
    vocabularies = []
    for _, tokenizer in (model, base):
        added = set(tokenizer.added_tokens_decoder)
        tokens = tokenizer.get_vocab().items()
        vocabularies.append({index: token for token, index in tokens if index not in added})
    model_tokens, base_tokens = vocabularies
    common_ids = model_tokens.keys() & base_tokens.keys()
    is_same = all(model_tokens[index] == base_tokens[index] for index in common_ids)
    sizes = [loaded.config.get_text_config().vocab_size for loaded, _ in (model, base)]
    if not is_same or sizes[0] != sizes[1]:
        raise UserError(
            f"models: expected a model with the {sizes[1]} tokens of its base {source.base.name!r}, got "
            f"{source.model.name!r} with {sizes[0]}{'' if is_same else ', some of them different'}. A KL between "
            "models with different tokens means nothing"
        )


# The queries of an evaluation


class Evaluator:
    """Answers the queries of an evaluation.

    Args:
        lineup: the models and chains that answer, each a row of the evaluation's table.
        columns: the queries' columns, including `prompt`.
        settings: numbers of samples and batch sizes.
        device: the models' device.

    Attributes:
        records: the records so far, by row name, in the order of the queries.
    """

    def __init__(
        self,
        lineup: Lineup,
        columns: dict[str, Sequence[Any]],
        settings: EvaluationConfig,
        device: torch.device,
    ) -> None:
        self.lineup = lineup
        self.columns = columns
        self.settings = settings
        self.device = device
        self.records: dict[str, list[Record]] = {}

    def run(self, path: Path) -> dict[str, list[Record]]:
        """Returns the records of every row and writes them as the lines of a file."""
        with path.open("w", encoding="utf-8") as file:
            for row in self.lineup.rows:
                self.records[row.name] = []
                for record in self._answer(row):
                    self.records[row.name].append(record)
                    file.write(json.dumps(record) + "\n")
        return self.records

    def _answer(self, row: Row) -> Iterator[Record]:
        """Loads a row's model and yields its records."""
        config = Config(precision=self.settings.precision)
        agent, base = load_agent(row.source, self.device, config, self.lineup.date)
        if row.reads is None:  # fails early if a query is too long
            sampling = row.task.prompts.settings(0).sampling(self.lineup.sampling)
            agent.encode_checked(
                row.task.prompts.render_rows(0, self.columns), sampling.max_new_tokens
            )

        count = len(self.columns["prompt"])
        size = max(1, self.settings.batch_size // self.settings.samples)
        bar = tqdm(total=count, desc=row.name, unit=" queries", leave=False, disable=None)
        with bar:
            for start in range(0, count, size):
                chunk = range(start, min(start + size, count))
                yield from self._answer_chunk(row, agent, base, chunk)
                bar.update(len(chunk))
        print(f"{row.name}: {count}/{count} queries", file=sys.stderr, flush=True)

    def _answer_chunk(
        self, row: Row, agent: Agent, base: PreTrainedModel | None, chunk: range
    ) -> list[Record]:
        """Returns a record for each query of a chunk."""
        samples = self.settings.samples
        sampling = self.lineup.sampling
        batch = Batch(self._columns(chunk, samples), sampling.max_new_tokens)
        chain = Chain([agent] * (row.role + 1), row.task, sampling)
        # A later role reads the responses that earlier roles have already given.
        earlier = [
            [text for query in chunk for text in self.records[reads.name][query]["completions"]]
            for reads in row.earlier
        ]
        rollout, divergences = respond(
            agent,
            base,
            chain.prompts(row.role, batch, earlier or None),
            chain.sampling_of(row.role, batch),
            # Seed roles separately; otherwise an observer reuses the draws that produced its input.
            seed=self.settings.seed * 1_000_003 + chunk.start + row.role * 2**64,
            batch_size=self.settings.batch_size,
        )
        role = row.task.prompts.name(row.role)
        rollout = replace(rollout, role=role)
        (scores,) = score_rollouts(row.task.reward, batch, [rollout], first=row.role)
        if row.task.extract is not None and any(k > 1 for k in self.settings.ks):
            # An error ends the evaluation now, not after its last answer.
            for text in rollout.completions:
                check_answer(row.task.extract(text))

        team_rewards = None
        if row.task.team is not None and row.role + 1 in self.lineup.team_sizes:
            columns = dict(batch.columns)
            prompts = columns.pop("prompt")
            chains = list(zip(*earlier, rollout.completions, strict=True))
            team_rewards = score_chains(row.task.team, prompts, chains, columns).tolist()

        records = []
        for position, query in enumerate(chunk):
            of_query = slice(position * samples, (position + 1) * samples)
            record = {
                "model": row.name,
                "query": query,
                "role": role,
                "read": row.reads.name if row.reads else None,
                **_responses_to_query(rollout, scores, divergences, of_query),
            }
            if self.lineup.sampled_kl:
                record["sampled_kl"] = [one.sampled_kl for one in divergences[of_query]]
            if team_rewards is not None:
                record["team_rewards"] = team_rewards[of_query]
            records.append(record)
        if self.settings.greedy:
            self._add_greedy(row, agent, chunk, records)
        return records

    def _add_greedy(self, row: Row, agent: Agent, chunk: range, records: list[Record]) -> None:
        """Adds the greedily decoded response and its reward to each record. Later roles read the greedy responses."""
        common = self.lineup.sampling
        sampling = SamplingConfig(1, common.max_new_tokens, top_k=1, stop=common.stop)
        batch = Batch(self._columns(chunk, 1), sampling.max_new_tokens)
        chain = Chain([agent] * (row.role + 1), row.task, sampling)
        earlier = [
            [self.records[reads.name][query]["greedy"] for query in chunk] for reads in row.earlier
        ]
        rollout = chain.respond(row.role, batch, earlier or None, torch.Generator())
        (scores,) = score_rollouts(row.task.reward, batch, [rollout], first=row.role)
        for record, text, reward in zip(
            records, rollout.completions, scores.total.tolist(), strict=True
        ):
            record["greedy"] = text
            record["greedy_reward"] = reward

    def _columns(self, chunk: range, samples: int) -> dict[str, list[Any]]:
        """Returns the columns of a chunk's queries, with each query repeated `samples` times."""
        return {
            name: repeated([values[query] for query in chunk], samples)
            for name, values in self.columns.items()
        }


def _responses_to_query(
    rollout: Rollout, scores: Scores, divergences: Sequence[Divergence], of_query: slice
) -> Record:
    """Returns the responses to one query, a slice of a rollout, with their rewards, lengths and divergences."""
    by_function = {
        function: [None if math.isnan(value) else value for value in values[of_query].tolist()]
        for function, values in scores.by_function.items()
    }
    return {
        "rewards": scores.total[of_query].tolist(),
        "rewards_by_function": by_function,
        "kl": [one.kl for one in divergences[of_query]],
        "base_nll": [one.base_nll for one in divergences[of_query]],
        "tokens": [len(ids) for ids in rollout.response_ids[of_query]],
        "prompt_tokens": [len(ids) for ids in rollout.prompt_ids[of_query]],
        "completions": rollout.completions[of_query],
        # Prompts are long, so only the first sample's prompt is kept.
        "prompt": rollout.prompts[of_query.start],
    }
