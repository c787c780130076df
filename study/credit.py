"""Audits credit assignment: bias and variance of gradient estimates against exact gradients, without training.

    python -m study.credit --out results/credit_audit     # rows.csv and variance.png; minutes on one core

Each of `ESTIMATORS`, from this package and other work, is applied to small chains of two and three tabular policies
(study/chain_gradients.py) under each reward structure (`STRUCTURES`). All outcomes of sampling are enumerated.

An estimate samples `GROUP` chains for one query, or a tree of responses to it.

* *Bias*: the estimate's mean minus the gradient of the expected sum of all rewards (Eq. 4), over all queries.
* *Variance*: the variance of an estimate given the query, summed over all parameters. It is computed after scaling the
  estimate so that the mean's component along the exact gradient has the exact gradient's length. Without the scaling,
  estimates that are too short would look better.
* *Variance at equal tokens*: the variance times the number of sampled tokens, because averaging n estimates divides the
  variance by n. A response is one token. Responses that serve only as a baseline count, too.

If its source allows it, an estimator's baseline is the mean over the other responses to the same prompt, as in RLOO. If
the prompt has only one response, the baseline is the mean over the other responses to the same query.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.ticker import NullLocator
from torch import Tensor

from cory.chain import LEAST_LOG_LIKELIHOOD
from cory.command import Arguments, main
from cory.config import AlgorithmName
from cory.credit import assign_credit
from cory.learners.algorithms import GRPO, group_advantages
from cory.run.plots import COLOURS, save
from study.cells import Rows
from study.chain_gradients import (
    NOTHING,
    Beside,
    Chain,
    Outcomes,
    concatenated,
    crossed,
    grouped,
    groups,
    moments,
    response,
    task_rewards,
    team_rewards,
)
from study.frame import make_folder

GROUP = 4  # chains per query, or first responses to it
ANSWERS = {2: 3, 3: 2}  # each role's number of possible answers, by the number of roles
WORLDS = 10  # random chains per structure
INFORMATION_WEIGHT = 0.1  # as in docs/learners.md
CCPO_LAMBDA = 0.2  # `counterfactual_lambda` in CCPO's code
REFERENCE = "sum"
ROWS = "rows.csv"
NO_ANGLE = 1e-3  # degrees; smaller angles are rounding errors

# Reward structures: what is rewarded, and what each role sees.
STRUCTURES = {
    "alike": "every role is rewarded for the right answer",
    "opposed": "the first role is rewarded for the right answer, the others are penalised for it",
    "last": "only the last role is rewarded",
    "team": "the chain has a single reward, earned if every role is right",
    "knowledge": "only the last role is rewarded, and only the first sees the query",
    "idle": "only the last role is rewarded, and no role reads another's response",
}


def make_chain(structure: str, roles: int, seed: int) -> Chain:
    """Makes a random chain. Each query has one right answer; roles tend to repeat what they read."""
    generator = torch.Generator().manual_seed(seed)
    answers = ANSWERS[roles]
    knowledge = structure == "knowledge"
    queries = answers if knowledge else 2
    right = torch.arange(queries)
    if not knowledge:
        right = torch.randint(answers, (queries,), generator=generator)
    is_right = torch.eye(answers, dtype=torch.float64)[right]

    def noise(*shape: int) -> Tensor:
        return 0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    policies = [noise(queries, 1, answers)]
    if knowledge:
        policies[0] += is_right[:, None]  # the first role tends to give the right answer
    repeat = 1.5 * torch.eye(answers + 1, answers, dtype=torch.float64)
    for _ in range(1, roles):
        tables = 1 if knowledge else queries
        unread_logits = noise(tables, 1, answers)
        logits_by_read = repeat + noise(tables, answers + 1, answers)
        if structure == "idle":
            logits_by_read = torch.zeros_like(logits_by_read)
        policies.append(unread_logits + logits_by_read)

    # The sign of a right answer's reward: in the first role, in those between, and in the last one.
    signs_by_structure = {"alike": (1, 1, 1), "opposed": (1, -1, -1), "team": (0, 0, 0)}
    first, between, last = signs_by_structure.get(structure, (0, 0, 1))
    signs = [first, *[between] * (roles - 2), last]
    rewards = tuple(sign * is_right for sign in signs)
    team = None
    if structure == "team":
        shape = (queries, *[1] * (roles - 1), answers)
        team = torch.ones(1, dtype=torch.float64)
        for role in range(roles):
            team = team * is_right.view(shape).movedim(-1, role + 1)
    return Chain(tuple(policies), rewards, team)


Advantages = Callable[[Chain, Outcomes], list[Tensor]]


def nothing_beside(chain: Chain) -> Beside:
    return {}


@dataclass(frozen=True)
class Estimator:
    """One way to estimate the gradient.

    Args:
        fanouts: by number of roles, each role's number of responses to each response of the previous role.
        advantages: computes each role's advantages, (outcomes, responses).
        beside: draws in addition to the chain's responses, such as a baseline's.
        sample: samples the outcomes. None: as a tree, by `fanouts`.
        source: the arXiv number.
    """

    fanouts: Mapping[int, tuple[int, ...]]
    advantages: Advantages
    beside: Callable[[Chain], Beside] = nothing_beside
    sample: Callable[[Chain], list[Outcomes]] | None = None
    source: str = ""

    def outcomes(self, chain: Chain) -> list[Outcomes]:
        if self.sample is not None:
            return self.sample(chain)
        return groups(chain, self.fanouts[len(chain.policies)], self.beside(chain))


def siblings(outcomes: Outcomes, role: int) -> int:
    """Returns how many responses are compared: all to the same prompt, or to the query if a prompt has only one."""
    count = outcomes.responses(role)
    before = outcomes.responses(role - 1) if role else 1
    return count if count == before else count // before


def credited(chain: Chain, outcomes: Outcomes, mode: str, weight: float = 1.0) -> list[Tensor]:
    """Returns each role's training rewards by `assign_credit`, with all outcomes as one batch."""
    rewards = [reward.flatten() for reward in task_rewards(chain, outcomes)]
    team = team_rewards(chain, outcomes)
    baselines, gained = [], []
    if mode == "counterfactual":
        for role in range(1, len(rewards)):
            unread = outcomes.columns["unread", role]
            reward = chain.rewards[role][outcomes.columns["query", role], unread]
            baselines.append(reward.flatten())
    if mode == "information":
        gained.append(information(chain, outcomes).flatten())
    team = None if team is None else team.flatten()
    trained = assign_credit(rewards, mode, weight, baselines, team, gained)
    return [reward.view(len(outcomes.chances), -1) for reward in trained]


def mode_advantages(
    chain: Chain,
    outcomes: Outcomes,
    mode: str,
    algorithm: AlgorithmName = "rloo",
    weight: float = 1.0,
) -> list[Tensor]:
    """Returns each role's advantages with a credit mode of `cory.credit` and a learner's algorithm."""
    advantages = []
    for role, rewards in enumerate(credited(chain, outcomes, mode, weight)):
        size = siblings(outcomes, role)
        branches = size if role and size < rewards.shape[1] else 1
        compared = group_advantages(rewards.flatten(), algorithm, size, branches)
        advantages.append(compared.view_as(rewards))
    return advantages


def unread(chain: Chain) -> Beside:
    """Adds a draw to each response of the later roles: the same role's response without reading."""
    return {
        role: ("unread", partial(chain.probabilities, role, read=NOTHING))
        for role in range(1, len(chain.policies))
    }


def elsewhere(chain: Chain) -> Beside:
    """Adds a draw to each response of the first role: its response to another query, which a batch has anyway."""

    def before(query: int) -> Tensor:
        return chain.probabilities(0, (query - 1) % chain.num_queries, NOTHING)

    return {0: ("elsewhere", before)}


def information(chain: Chain, outcomes: Outcomes) -> Tensor:
    """Returns `l(a1) - l(a1')`: role 2's gain in log-likelihood of the best answer from reading a1 instead of a1'.

    a1 is the first role's response to the query, a1' its response to another query (`elsewhere`).
    """
    queries = outcomes.columns["query", 1]
    likelihoods = answer_likelihoods(chain)
    answers, baseline = outcomes.columns["answer", 0], outcomes.columns["elsewhere", 0]
    return likelihoods[queries, answers] - likelihoods[queries, baseline]


def answer_likelihoods(chain: Chain) -> Tensor:
    """Returns `l(a1)`: role 2's log-likelihood of the best answer, by query and answer read, with a lower bound."""
    best = (chain.rewards[1] if chain.team is None else chain.team.sum(1)).argmax(-1)
    table = chain.policies[1].log_softmax(-1).expand(len(best), -1, -1)
    return table[torch.arange(len(best)), :, best].clamp(min=LEAST_LOG_LIKELIHOOD)


def joint_return(chain: Chain, outcomes: Outcomes) -> Tensor:
    """Returns the sum of all rewards in the chain that ends with each of the last role's responses."""
    last = len(chain.policies) - 1
    team = team_rewards(chain, outcomes)
    total = torch.zeros(1) if team is None else team
    for reward in task_rewards(chain, outcomes):
        total = total + outcomes.follow(reward, last)
    return total


def magrpo(chain: Chain, outcomes: Outcomes) -> list[Tensor]:
    """MAGRPO: for each of K joint responses, every agent's advantage is `R^k - mean_l R^l`.

    Source: CoMLRL, docs/.../multi-agent-reinforce.md, and `_compute_advantages` in
    comlrl/trainers/reinforce/magrpo.py with its default, `mean`. CoMLRL's agents answer at the same time; here a joint
    response is a chain.
    """
    returns = joint_return(chain, outcomes)
    return [returns - returns.mean(1, keepdim=True)] * len(chain.policies)


def c3(chain: Chain, outcomes: Outcomes) -> list[Tensor]:
    """C3: a response's mean return minus the other responses' mean return, given the same transcript before them.

    Source: `C3CreditProvider.compute` in c3/credit/c3/provider.py with `reward_only` and `loo`. C3 replays alternatives
    to a message in the frozen context. Its other two variants add a critic.
    """
    returns = joint_return(chain, outcomes)
    advantages = []
    for role in range(len(chain.policies)):
        count = outcomes.responses(role)
        values = returns.view(len(returns), count, -1).mean(2)
        families = values.view(len(returns), -1, siblings(outcomes, role))
        others = (families.sum(2, keepdim=True) - families) / (families.shape[2] - 1)
        advantages.append((families - others).view_as(values))
    return advantages


def solo_return(chain: Chain, outcomes: Outcomes) -> Tensor:
    """Returns the second role's reward without the first role, and without a team reward."""
    return chain.rewards[1][outcomes.columns["query", 1], outcomes.columns["unread", 1]]


def ccpo(chain: Chain, outcomes: Outcomes) -> list[Tensor]:
    """CCPO: rewards `R + lambda / 2 (R - mean solo)` for the first role and `R` for the second, then GRPO.

    Source: `_compute_counterfactual_role_rewards` in CCPO/examples/gspo_trainer/two_model/two_model_trainer.py, in its
    form for rewards of any size, with its default baseline, the group's mean solo reward. For outcomes of -1 and 1, the
    source adds an event bonus instead, which gives the same advantages, as it is linear in R within a group.
    """
    joint, solo = joint_return(chain, outcomes), solo_return(chain, outcomes)
    bonus = (joint - solo.mean(1, keepdim=True)) / 2
    return [GRPO.advantages(joint + CCPO_LAMBDA * bonus), GRPO.advantages(joint)]


def ccpo_v1(chain: Chain, outcomes: Outcomes) -> list[Tensor]:
    """CCPO as first published: rewards are shaped by their history's mean and standard deviation, then GRPO.

    Source: src/verl/verl/workers/reward_manager/leave_one_out_rema.py and historical_normalizer.py. With `D = R - solo`
    and `z` the standardised value, `r1 = tanh(z(D))` and `r2 = g z(R) + (1 - g) z(solo)`, where
    `g = sigmoid(mean(D) / std(D))`. The source tracks the statistics by moving averages; here they are exact for the
    current policies.
    """
    joint, solo = joint_return(chain, outcomes), solo_return(chain, outcomes)
    (mean, std), (joint_mean, joint_std), (solo_mean, solo_std) = history(chain)
    gate = torch.sigmoid(mean / std)
    shaped = torch.tanh((joint - solo - mean) / std)
    gated = gate * (joint - joint_mean) / joint_std + (1 - gate) * (solo - solo_mean) / solo_std
    return [GRPO.advantages(shaped), GRPO.advantages(gated)]


def history(chain: Chain) -> list[tuple[Tensor, Tensor]]:
    """Returns the mean and standard deviation of `R - solo`, `R` and `solo` over a chain's outcomes."""
    outcomes = concatenated(groups(chain, (1, 1), unread(chain)))
    joint, solo = joint_return(chain, outcomes)[:, 0], solo_return(chain, outcomes)[:, 0]
    statistics = []
    for values in (joint - solo, joint, solo):
        mean = outcomes.chances @ values
        deviation = (outcomes.chances @ (values - mean).square()).sqrt()
        statistics.append((mean, torch.where(deviation > 1e-3, deviation, 1.0)))
    return statistics


def all_steps(chain: Chain, outcomes: Outcomes) -> list[Tensor]:
    """GRPO over the steps of all agents together, which Dr. MAS replaces by GRPO for each agent.

    Source: `compute_grpo_outcome_advantage` in verl/trainer/ppo/core_algos.py, which groups by query or, with
    `group_by_agent_id`, by query and agent; the latter is `causal, GRPO` here. Both groupings use causal
    credit's rewards. If all agents shared one reward and acted once each, the groupings would give equal advantages.
    """
    rewards = credited(chain, outcomes, "causal")
    together = GRPO.advantages(torch.cat(rewards, dim=1))
    return list(together.split([reward.shape[1] for reward in rewards], dim=1))


def best_of_each(chain: Chain) -> list[Outcomes]:
    """Samples `GROUP` responses of each role to one prompt; the next role reads the one with the highest reward.

    Source: `argmax` of the rewards in `generate_env_idx_rollout`, pettingllms/trainer/multi_agents_execution_engine.py.
    """
    return [
        candidates(chain, query, 0, NOTHING).scaled(1 / chain.num_queries)
        for query in range(chain.num_queries)
    ]


def candidates(chain: Chain, query: int, role: int, read: int) -> Outcomes:
    """Samples a role's responses to one prompt, and the later roles' responses that follow."""
    outcomes = grouped(response(chain, role, query, read), GROUP)
    if role + 1 == len(chain.policies):
        return outcomes
    answers = outcomes.columns["answer", role]
    rewards = chain.rewards[role][query, answers]
    # The source picks the first of several best responses. Outcomes have no order, so each is first equally often.
    best = (rewards == rewards.max(1, keepdim=True).values).double()
    best = best / best.sum(1, keepdim=True)
    parts = []
    for answer in range(chain.policies[role].shape[-1]):
        chosen = outcomes._replace(chances=outcomes.chances * (best * (answers == answer)).sum(1))
        parts.append(crossed(chosen, candidates(chain, query, role + 1, answer)))
    return concatenated(parts)


def at_grpo(chain: Chain, outcomes: Outcomes) -> list[Tensor]:
    """AT-GRPO: GRPO for each agent and turn, with each response's own reward.

    Source: `_assign_consistent_uids` in pettingllms/trainer/multi_agents_ppo_trainer.py. A team reward is known only at
    the end, so it is added to the last role's reward.
    """
    rewards = task_rewards(chain, outcomes)
    team = team_rewards(chain, outcomes)
    if team is not None:
        rewards[-1] = rewards[-1] + team
    return [GRPO.advantages(reward) for reward in rewards]


CHAINS = {2: (GROUP, 1), 3: (GROUP, 1, 1)}
PAIRS = {2: (GROUP, 1)}


def mode(name: str, algorithm: AlgorithmName = "rloo", weight: float = 1.0) -> Advantages:
    return partial(mode_advantages, mode=name, algorithm=algorithm, weight=weight)


ESTIMATORS = {
    "sum": Estimator(CHAINS, mode("collective")),
    "mean": Estimator(CHAINS, mode("mean")),
    "causal": Estimator(CHAINS, mode("causal")),
    "own": Estimator(CHAINS, mode("own")),
    "counterfactual": Estimator(CHAINS, mode("counterfactual"), unread),
    "information": Estimator(PAIRS, mode("information", weight=INFORMATION_WEIGHT), elsewhere),
    "causal, B = 2": Estimator({2: (GROUP, 2)}, mode("causal")),
    "causal, B = 4": Estimator({2: (GROUP, 4)}, mode("causal")),
    "sum, GRPO": Estimator(CHAINS, mode("collective", "grpo")),
    "causal, GRPO": Estimator(CHAINS, mode("causal", "grpo"), source="2602.08847"),
    "causal, GRPO over all steps": Estimator(CHAINS, all_steps, source="2602.08847"),
    "MAGRPO": Estimator(CHAINS, magrpo, source="2508.04652"),
    "C3, 4 x 2": Estimator({2: (GROUP, 2), 3: (GROUP, 2, 2)}, c3, source="2603.06859"),
    "C3, 2 x 4": Estimator({2: (2, 4)}, c3, source="2603.06859"),
    "CCPO": Estimator(PAIRS, ccpo, unread, source="2603.21563"),
    "CCPO, v1": Estimator(PAIRS, ccpo_v1, unread, source="2603.21563v1"),
    "AT-GRPO": Estimator(CHAINS, at_grpo, sample=best_of_each, source="2510.11062"),
}


def audit(chain: Chain, estimator: Estimator) -> dict[str, float]:
    """Computes an estimator's bias and variance on a chain.

    Returns:
        Values by column. A gradient covers all roles' parameters unless its column names a role.

        * `exact`, `bias`: the norms of the exact gradient and of the bias.
        * `along`: the mean's component along the exact gradient, divided by the exact gradient's norm.
        * `angle`: the angle between the mean and the exact gradient, in degrees.
        * `tokens`, `rows`: an estimate's sampled tokens, and its training rows, which exclude baselines.
        * `variance`: the variance without scaling.
        * `at_equal_tokens`, `at_equal_rows`: the scaled variance times `tokens` or `rows`.
        * `queries_drawn`: `at_equal_tokens` with the variance between queries added.
        * `angle_1`, `at_equal_tokens_1`, ...: the same for one role's gradient, with its own scale. If the role's exact
          gradient is 0, the whole gradient's scale is used.
    """
    parts = estimator.outcomes(chain)
    exact = chain.objective_gradient()
    estimate = moments(chain, parts, partial(estimator.advantages, chain))
    rows = sum(parts[0].responses(role) for role in range(len(exact)))
    extra = [column.shape[1] for (name, _), column in parts[0].columns.items() if name == "unread"]
    tokens = rows + sum(extra)
    mean, wanted = torch.cat(estimate.means), torch.cat(exact)
    within = sum(estimate.within)
    scale = to_scale(mean, wanted)
    row = {
        "exact": wanted.norm().item(),
        "bias": (mean - wanted).norm().item(),
        "along": (mean @ wanted / wanted.square().sum()).item(),
        "angle": angle(mean, wanted),
        "tokens": tokens,
        "rows": rows,
        "variance": within,
        "at_equal_tokens": within * scale * tokens,
        "at_equal_rows": within * scale * rows,
        "queries_drawn": sum(estimate.variances) * scale * tokens,
    }
    for role, wanted in enumerate(exact):
        role_scale = scale if wanted.norm() < 1e-12 else to_scale(estimate.means[role], wanted)
        row[f"angle_{role + 1}"] = angle(estimate.means[role], wanted)
        row[f"at_equal_tokens_{role + 1}"] = estimate.within[role] * role_scale * tokens
    return row


def to_scale(mean: Tensor, wanted: Tensor) -> float:
    """Returns the factor that scales an estimate's variance; NaN if its mean does not point along the gradient."""
    along = (mean @ wanted / wanted.square().sum()).item()
    return 1 / along**2 if along > 1e-9 else math.nan


def angle(mean: Tensor, wanted: Tensor) -> float:
    """Returns the angle between two gradients in degrees; NaN if one of them is 0."""
    if min(mean.norm().item(), wanted.norm().item()) < 1e-12:
        return math.nan
    first, second = mean / mean.norm(), wanted / wanted.norm()
    # For small angles, the arc cosine of the scalar product would lose half of the digits.
    return math.degrees(
        2 * math.atan2((first - second).norm().item(), (first + second).norm().item())
    )


def audited(worlds: int = WORLDS, names: Sequence[str] = tuple(ESTIMATORS)) -> pd.DataFrame:
    """Audits estimators: returns a row per number of roles, structure, random chain (`world`) and estimator."""
    rows = []
    for roles in ANSWERS:
        for structure in STRUCTURES:
            for world in range(worlds):
                chain = make_chain(structure, roles, world)
                for name in names:
                    if roles in ESTIMATORS[name].fanouts:
                        key = {"roles": roles, "structure": structure, "world": world}
                        row = {**key, "estimator": name, **audit(chain, ESTIMATORS[name])}
                        rows.append(row)
    return pd.DataFrame(rows)


def relative(rows: pd.DataFrame, column: str, angle_column: str = "angle") -> pd.DataFrame:
    """Divides a column by its value for `REFERENCE` on the same chain, by roles, structure and estimator.

    Returns:
        A frame with `ratio`, the geometric mean over random chains, and `is_off`: whether the estimator's mean has
        another direction than the gradient on any chain.
    """
    world = ["roles", "structure", "world"]
    reference_values = rows[rows["estimator"] == REFERENCE].set_index(world)[column]
    with np.errstate(divide="ignore"):  # an estimate may have a variance of 0
        ratio = np.log(rows[column] / rows.set_index(world).index.map(reference_values))
    marked = rows.assign(ratio=ratio, is_off=rows[angle_column] > NO_ANGLE)
    by = marked.groupby(["roles", "structure", "estimator"])
    # The ratio is NaN if a mean does not point along the gradient. One such chain makes the whole mean NaN.
    means = np.exp(by["ratio"].agg(lambda values: values.mean(skipna=False)))
    return pd.DataFrame({"ratio": means, "is_off": by["is_off"].any()})


def table(rows: pd.DataFrame) -> Rows:
    """Returns a row per estimator: its bias over all chains, and its variance at equal tokens by structure."""
    ratios = relative(rows, "at_equal_tokens")["ratio"]
    with_queries = relative(rows, "queries_drawn")["ratio"]
    lines = []
    for name, estimator in ESTIMATORS.items():
        audits = rows[rows["estimator"] == name]
        line = {
            "estimator": name,
            "source": estimator.source,
            "tokens": ", ".join(map(str, audits["tokens"].unique())),
            "bias": span(audits["bias"] / audits["exact"], "{:.2f}"),
            "angle": span(audits["angle"], "{:.0f}°"),
        }
        for structure in STRUCTURES:
            by_roles = [ratios.get((roles, structure, name)) for roles in audits["roles"].unique()]
            line[structure] = ", ".join("none" if np.isnan(v) else f"{v:.2f}" for v in by_roles)
        line["pays from"] = pays_from(ratios, name)
        if line["pays from"]:
            line["pays from"] += f", {pays_from(with_queries, name)}"
        lines.append(line)
    return lines


def pays_from(ratios: "pd.Series[float]", name: str) -> str:
    """Returns how long the first role's responses must be for a tree to pay off, or an empty string for plain chains.

    If the first role's responses have more tokens than the number returned, the tree has less variance than causal
    credit at equal tokens. The number is for two roles and the structure `knowledge`. The second role's responses have
    one token.
    """
    first, *branches = ESTIMATORS[name].fanouts[2]
    if branches == [1]:
        return ""
    responses = first * (1 + branches[0])
    variance = ratios[2, "knowledge", name] / responses
    causal = ratios[2, "knowledge", "causal"] / (2 * GROUP)
    # Solves variance * (first * length + responses - first) < causal * (GROUP * length + GROUP) for length.
    gain = causal * GROUP - variance * first
    return (
        f"{(variance * (responses - first) - causal * GROUP) / gain:.1f}" if gain > 0 else "never"
    )


def span(values: "pd.Series[float]", form: str) -> str:
    """Formats the smallest and the largest value; 0 if all values are rounding errors."""
    low, high = form.format(values.min()), form.format(values.max())
    if values.max() < 1e-6:
        return "0"
    return high if low == high else f"{low} to {high}"


# Related estimators share a colour; each has its own marker. Estimators that equal another one are left out: `mean` and
# MAGRPO equal `sum`, and C3 with 4 x 2 equals `causal, B = 2`.
DRAWN = {
    "causal": (COLOURS[1], "o"),
    "causal, B = 2": (COLOURS[1], "^"),
    "causal, B = 4": (COLOURS[1], "s"),
    "C3, 2 x 4": (COLOURS[1], "v"),
    "counterfactual": (COLOURS[0], "o"),
    "information": (COLOURS[2], "o"),
    "own": (COLOURS[3], "o"),
    "sum, GRPO": (COLOURS[4], "D"),
    "causal, GRPO": (COLOURS[4], "o"),
    "causal, GRPO over all steps": (COLOURS[4], "P"),
    "CCPO": (COLOURS[6], "D"),
    "CCPO, v1": (COLOURS[6], "X"),
    "AT-GRPO": (COLOURS[7], "D"),
}
TICKS = (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20)


def plot(rows: pd.DataFrame, path: Path) -> None:
    """Plots the variance at equal tokens by reward structure and estimator, for chains of two roles."""
    figure, axes = plt.subplots(2, 1, figsize=(11, 8.4), sharex=True, layout="constrained")
    titles = {"": "Both roles", "_1": "The first role alone"}
    positions = np.arange(len(STRUCTURES))
    for axis, (role, title) in zip(axes, titles.items(), strict=True):
        pairs = rows[rows["roles"] == 2]
        ratios = relative(pairs, f"at_equal_tokens{role}", f"angle{role}").loc[2]
        for i, (name, (colour, marker)) in enumerate(DRAWN.items()):
            by_structure = ratios.xs(name, level="estimator").reindex(STRUCTURES)
            x = positions + (i / (len(DRAWN) - 1) - 0.5) * 0.78
            for is_off in (False, True):
                shown = by_structure["is_off"].to_numpy() == is_off
                axis.plot(
                    x[shown],
                    by_structure["ratio"].to_numpy()[shown],
                    marker,
                    color=colour,
                    mfc="white" if is_off else colour,
                    ms=7,
                    mew=1.4,
                    zorder=3,
                )
            axis.plot([], [], marker, color=colour, ms=7, label=name)
        axis.axhline(1, color="0.35", lw=1, zorder=1)
        for edge in positions[:-1] + 0.5:
            axis.axvline(edge, color="0.88", lw=1, zorder=0)
        axis.set(yscale="log", title=title, ylabel=f"variance at equal tokens, over {REFERENCE}'s")
        limits = axis.get_ylim()
        axis.set_yticks(TICKS, map(str, TICKS))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_ylim(limits)
        axis.grid(axis="y", color="0.93", zorder=0)
    axes[-1].set_xticks(positions, STRUCTURES)
    axes[-1].set_xlim(-0.5, len(positions) - 0.5)
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside right upper",
        title="hollow: the mean has another\ndirection than the gradient",
        frameon=False,
    )
    save(figure, path)


def command_line(argv: Sequence[str] | None = None) -> None:
    """Runs `python -m study.credit`; see the module's docstring."""
    parser = Arguments(__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="Folder of rows.csv and variance.png"
    )
    parser.add_argument("--worlds", type=int, default=WORLDS, help="Random chains per structure")
    args = parser.parse_args(argv)
    started = time.monotonic()
    make_folder("--out", args.out)
    rows = audited(args.worlds)
    rows.to_csv(args.out / ROWS, index=False, float_format="%.10g")
    plot(rows, args.out / "variance.png")
    print(f"{len(rows)} rows in {args.out}, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main(command_line)
