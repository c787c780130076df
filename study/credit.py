"""Audits credit: bias and variance of gradient estimates against exact gradients, on small chains, without training.

    python -m study.credit --out results/credit_audit     # rows.csv and variance.png; minutes on one core

Chains of two and three tabular policies (study/chain_gradients.py) under each of `STRUCTURES`, and each of
`ESTIMATORS`, this package's and others', by enumeration of all outcomes.

An estimate has GROUP chains of a query, or a tree of responses to it. Its *bias* is its mean minus the gradient of the
expected sum of all rewards (Eq. 4), over all queries. Its *variance* is that of the samples, given the query, summed
over all parameters, after a scaling: the mean's component along the exact gradient gets the exact gradient's length, or
shorter estimates would look better. *At equal tokens* it is multiplied by the sampled tokens, as n times as many
estimates have an n-th of the variance. A response is one token; those that are drawn as a baseline alone count, too.

The baseline is the same where the source allows it: the mean of the other responses to the same prompt, as in RLOO, or
to the same query, where a response to a prompt is the only one.
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

GROUP = 4  # chains of a query, or first responses to it
ANSWERS = {2: 3, 3: 2}  # of each role, by the number of roles
WORLDS = 10  # random chains of each structure
INFORMATION_WEIGHT = 0.1  # as in docs/learners.md
CCPO_LAMBDA = 0.2  # its `counterfactual_lambda`
REFERENCE = "sum"
ROWS = "rows.csv"
NO_ANGLE = 1e-3  # degrees; what rounding leaves of none

# What is rewarded, and what is read.
STRUCTURES = {
    "alike": "every role is rewarded for the right answer",
    "opposed": "the first role is rewarded for the right answer, the others lose by it",
    "last": "only the last role is rewarded",
    "team": "one reward for the whole chain, where every role is right",
    "knowledge": "only the last role is rewarded, and only the first sees the query",
    "idle": "only the last role is rewarded, and none reads another",
}


def make_chain(structure: str, roles: int, seed: int) -> Chain:
    """A random chain. A query has one right answer; roles tend to repeat what they read."""
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
        policies[0] += is_right[:, None]  # it tells something of what it knows
    repeat = 1.5 * torch.eye(answers + 1, answers, dtype=torch.float64)
    for _ in range(1, roles):
        tables = 1 if knowledge else queries
        unread, read = noise(tables, 1, answers), repeat + noise(tables, answers + 1, answers)
        policies.append(unread + (0.0 if structure == "idle" else 1.0) * read)

    first, between, last = {"alike": (1, 1, 1), "opposed": (1, -1, -1), "team": (0, 0, 0)}.get(
        structure, (0, 0, 1)
    )
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
        fanouts: by the number of roles, how many responses each gives to each of the role before.
        advantages: of each role's responses, (outcomes, responses).
        beside: what is drawn beside the chain's own responses.
        sample: all outcomes, where they are not those of a tree.
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
    """How many responses are compared: all to the same prompt, or, where that is one, all to the query."""
    count = outcomes.responses(role)
    before = outcomes.responses(role - 1) if role else 1
    return count if count == before else count // before


def credited(chain: Chain, outcomes: Outcomes, mode: str, weight: float = 1.0) -> list[Tensor]:
    """The training rewards of each role by `assign_credit`, all outcomes being one batch."""
    rewards = [reward.flatten() for reward in task_rewards(chain, outcomes)]
    team = team_rewards(chain, outcomes)
    baselines, told = [], []
    if mode == "counterfactual":
        for role in range(1, len(rewards)):
            unread = outcomes.columns["unread", role]
            reward = chain.rewards[role][outcomes.columns["query", role], unread]
            baselines.append(reward.flatten())
    if mode == "information":
        told.append(information(chain, outcomes).flatten())
    team = None if team is None else team.flatten()
    trained = assign_credit(rewards, mode, weight, baselines, team, told)
    return [reward.view(len(outcomes.chances), -1) for reward in trained]


def mode_advantages(
    chain: Chain,
    outcomes: Outcomes,
    mode: str,
    algorithm: AlgorithmName = "rloo",
    weight: float = 1.0,
) -> list[Tensor]:
    """A mode of `cory.credit` with the advantages of a learner."""
    advantages = []
    for role, rewards in enumerate(credited(chain, outcomes, mode, weight)):
        size = siblings(outcomes, role)
        branches = size if role and size < rewards.shape[1] else 1
        compared = group_advantages(rewards.flatten(), algorithm, size, branches)
        advantages.append(compared.view_as(rewards))
    return advantages


def unread(chain: Chain) -> Beside:
    """Beside each response after the first, one of the same role that has read nothing."""
    return {
        role: ("unread", partial(chain.probabilities, role, read=NOTHING))
        for role in range(1, len(chain.policies))
    }


def elsewhere(chain: Chain) -> Beside:
    """Beside each first response, one to the query before, which a batch has anyway."""

    def before(query: int) -> Tensor:
        return chain.probabilities(0, (query - 1) % chain.num_queries, NOTHING)

    return {0: ("elsewhere", before)}


def information(chain: Chain, outcomes: Outcomes) -> Tensor:
    """`l(a1) - l(a1')`, how much likelier the right answer is to role 2 with the first role's response."""
    queries = outcomes.columns["query", 1]
    likelihoods = answer_likelihoods(chain)
    told, baseline = outcomes.columns["answer", 0], outcomes.columns["elsewhere", 0]
    return likelihoods[queries, told] - likelihoods[queries, baseline]


def answer_likelihoods(chain: Chain) -> Tensor:
    """`l(a1)`: the log-likelihood of the best answer to role 2, by query and what it reads, with the floor."""
    best = (chain.rewards[1] if chain.team is None else chain.team.sum(1)).argmax(-1)
    table = chain.policies[1].log_softmax(-1).expand(len(best), -1, -1)
    return table[torch.arange(len(best)), :, best].clamp(min=LEAST_LOG_LIKELIHOOD)


def joint_return(chain: Chain, outcomes: Outcomes) -> Tensor:
    """The sum of all rewards on the way to each response of the last role."""
    last = len(chain.policies) - 1
    team = team_rewards(chain, outcomes)
    total = torch.zeros(1) if team is None else team
    for reward in task_rewards(chain, outcomes):
        total = total + outcomes.follow(reward, last)
    return total


def magrpo(chain: Chain, outcomes: Outcomes) -> list[Tensor]:
    """MAGRPO: every agent gets `R^k - mean_l R^l` of the K joint responses.

    CoMLRL, docs/.../multi-agent-reinforce.md, and `_compute_advantages` in comlrl/trainers/reinforce/magrpo.py with its
    default `mean`. There agents answer at the same time; here a joint response is a chain.
    """
    returns = joint_return(chain, outcomes)
    return [returns - returns.mean(1, keepdim=True)] * len(chain.policies)


def c3(chain: Chain, outcomes: Outcomes) -> list[Tensor]:
    """C3: the mean return below a response, minus that of the other responses to the same transcript.

    `C3CreditProvider.compute` in c3/credit/c3/provider.py with `reward_only` and `loo`: alternatives to a message are
    replayed in the frozen context. Without the critic that its other two variants add.
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
    """What the second role earns where the first is removed; no team reward without the whole team."""
    return chain.rewards[1][outcomes.columns["query", 1], outcomes.columns["unread", 1]]


def ccpo(chain: Chain, outcomes: Outcomes) -> list[Tensor]:
    """CCPO: `R + lambda / 2 (R - mean solo)` for the first role, `R` for the second, then GRPO.

    `_compute_counterfactual_role_rewards` in CCPO/examples/gspo_trainer/two_model/two_model_trainer.py, for rewards of
    any size, with the group's solo baseline, its default. For outcomes of -1 and 1 its event bonus has the same
    advantages: within a group it is linear in R.
    """
    joint, solo = joint_return(chain, outcomes), solo_return(chain, outcomes)
    bonus = (joint - solo.mean(1, keepdim=True)) / 2
    return [GRPO.advantages(joint + CCPO_LAMBDA * bonus), GRPO.advantages(joint)]


def ccpo_v1(chain: Chain, outcomes: Outcomes) -> list[Tensor]:
    """CCPO as first published: both rewards shaped by statistics of the history, then GRPO.

    src/verl/verl/workers/reward_manager/leave_one_out_rema.py and historical_normalizer.py: `r1 = tanh(z(D))`,
    `D = R - solo`, and `r2 = g z(R) + (1 - g) z(solo)`, `g = sigmoid(mean(D) / std(D))`. The statistics are the exact
    ones of a chain under these policies, to which the moving averages tend.
    """
    joint, solo = joint_return(chain, outcomes), solo_return(chain, outcomes)
    (mean, std), of_joint, of_solo = history(chain)
    gate = torch.sigmoid(mean / std)
    shaped = torch.tanh((joint - solo - mean) / std)
    gated = (
        gate * (joint - of_joint[0]) / of_joint[1] + (1 - gate) * (solo - of_solo[0]) / of_solo[1]
    )
    return [GRPO.advantages(shaped), GRPO.advantages(gated)]


def history(chain: Chain) -> list[tuple[Tensor, Tensor]]:
    """Mean and standard deviation of `R - solo`, `R` and `solo` of one chain."""
    outcomes = concatenated(groups(chain, (1, 1), unread(chain)))
    joint, solo = joint_return(chain, outcomes)[:, 0], solo_return(chain, outcomes)[:, 0]
    statistics = []
    for values in (joint - solo, joint, solo):
        mean = outcomes.chances @ values
        deviation = (outcomes.chances @ (values - mean).square()).sqrt()
        statistics.append((mean, torch.where(deviation > 1e-3, deviation, 1.0)))
    return statistics


def all_steps(chain: Chain, outcomes: Outcomes) -> list[Tensor]:
    """GRPO over the steps of all agents together, what Dr. MAS replaces by GRPO for each agent.

    `compute_grpo_outcome_advantage` in verl/trainer/ppo/core_algos.py with groups by query, or by query and agent
    (`group_by_agent_id`), which is `grpo` here. Rewards are those of causal credit: with one reward for all agents, who
    each act once, both would be the same.
    """
    rewards = credited(chain, outcomes, "causal")
    together = GRPO.advantages(torch.cat(rewards, dim=1))
    return list(together.split([reward.shape[1] for reward in rewards], dim=1))


def best_of_each(chain: Chain) -> list[Outcomes]:
    """GROUP responses of each role to one prompt; the next role reads the one that earns most.

    `generate_env_idx_rollout` in pettingllms/trainer/multi_agents_execution_engine.py, `argmax` of the rewards.
    """
    return [
        candidates(chain, query, 0, NOTHING).scaled(1 / chain.num_queries)
        for query in range(chain.num_queries)
    ]


def candidates(chain: Chain, query: int, role: int, read: int) -> Outcomes:
    """The responses of a role to one prompt, and of those after it."""
    outcomes = grouped(response(chain, role, query, read), GROUP)
    if role + 1 == len(chain.policies):
        return outcomes
    answers = outcomes.columns["answer", role]
    rewards = chain.rewards[role][query, answers]
    # The first of those that earn most. Outcomes have no order, so it is each of them equally often.
    best = (rewards == rewards.max(1, keepdim=True).values).double()
    best = best / best.sum(1, keepdim=True)
    parts = []
    for answer in range(chain.policies[role].shape[-1]):
        chosen = outcomes._replace(chances=outcomes.chances * (best * (answers == answer)).sum(1))
        parts.append(crossed(chosen, candidates(chain, query, role + 1, answer)))
    return concatenated(parts)


def at_grpo(chain: Chain, outcomes: Outcomes) -> list[Tensor]:
    """AT-GRPO: each role's candidates by what they earn when they are written, GRPO for each agent and turn.

    `_assign_consistent_uids` in pettingllms/trainer/multi_agents_ppo_trainer.py. A team reward is known at the end
    alone, so it is part of the last role's.
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
    """Bias and variance of an estimator on a chain.

    Returns: `exact`, the norm of the exact gradient; `bias`, that of the bias; `angle` in degrees between mean and
    exact gradient, and `along`, the mean's component along it over its length; `tokens` and `rows` of an estimate; its
    `variance` as it is, and, scaled, `at_equal_tokens` and `at_equal_rows`; `queries_drawn`, at equal tokens with the
    variance between queries. For each role `angle_1` and `at_equal_tokens_1`, of its own gradient and scaled alone;
    where that is 0, as the whole.
    """
    parts = estimator.outcomes(chain)
    exact = chain.objective_gradient()
    estimate = moments(chain, parts, partial(estimator.advantages, chain))
    rows = sum(parts[0].responses(role) for role in range(len(exact)))
    drawn = [column.shape[1] for (name, _), column in parts[0].columns.items() if name == "unread"]
    tokens = rows + sum(drawn)
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
        of_role = scale if wanted.norm() < 1e-12 else to_scale(estimate.means[role], wanted)
        row[f"angle_{role + 1}"] = angle(estimate.means[role], wanted)
        row[f"at_equal_tokens_{role + 1}"] = estimate.within[role] * of_role * tokens
    return row


def to_scale(mean: Tensor, wanted: Tensor) -> float:
    """What the variance of an estimate is multiplied by; NaN where its mean does not lead along the gradient."""
    along = (mean @ wanted / wanted.square().sum()).item()
    return 1 / along**2 if along > 1e-9 else math.nan


def angle(mean: Tensor, wanted: Tensor) -> float:
    """Degrees between two gradients; NaN where one is 0."""
    if min(mean.norm().item(), wanted.norm().item()) < 1e-12:
        return math.nan
    first, second = mean / mean.norm(), wanted / wanted.norm()
    # The arc cosine of a small angle has half the digits.
    return math.degrees(
        2 * math.atan2((first - second).norm().item(), (first + second).norm().item())
    )


def audited(worlds: int = WORLDS, names: Sequence[str] = tuple(ESTIMATORS)) -> pd.DataFrame:
    """A row for each number of roles, structure, random chain and estimator."""
    rows = []
    for roles in ANSWERS:
        for structure in STRUCTURES:
            for world in range(worlds):
                chain = make_chain(structure, roles, world)
                for name in names:
                    if roles in ESTIMATORS[name].fanouts:
                        place = {"roles": roles, "structure": structure, "world": world}
                        row = {**place, "estimator": name, **audit(chain, ESTIMATORS[name])}
                        rows.append(row)
    return pd.DataFrame(rows)


def relative(rows: pd.DataFrame, column: str, of_angle: str = "angle") -> pd.DataFrame:
    """A column over that of `REFERENCE` in the same world: its geometric mean over worlds, and whether the estimator's
    direction is off in any, by roles, structure and estimator.
    """
    world = ["roles", "structure", "world"]
    of_reference = rows[rows["estimator"] == REFERENCE].set_index(world)[column]
    with np.errstate(divide="ignore"):  # an estimate may have no variance at all
        ratio = np.log(rows[column] / rows.set_index(world).index.map(of_reference))
    marked = rows.assign(ratio=ratio, is_off=rows[of_angle] > NO_ANGLE)
    by = marked.groupby(["roles", "structure", "estimator"])
    # A world without progress leaves no mean.
    means = np.exp(by["ratio"].agg(lambda values: values.mean(skipna=False)))
    return pd.DataFrame({"ratio": means, "is_off": by["is_off"].any()})


def table(rows: pd.DataFrame) -> Rows:
    """A row for each estimator: its bias over all chains, and its variance at equal tokens by structure."""
    ratios = relative(rows, "at_equal_tokens")["ratio"]
    drawn = relative(rows, "queries_drawn")["ratio"]
    lines = []
    for name, estimator in ESTIMATORS.items():
        own = rows[rows["estimator"] == name]
        line = {
            "estimator": name,
            "source": estimator.source,
            "tokens": ", ".join(map(str, own["tokens"].unique())),
            "bias": span(own["bias"] / own["exact"], "{:.2f}"),
            "angle": span(own["angle"], "{:.0f}°"),
        }
        for structure in STRUCTURES:
            found = [ratios.get((roles, structure, name)) for roles in own["roles"].unique()]
            line[structure] = ", ".join("none" if np.isnan(v) else f"{v:.2f}" for v in found)
        line["pays from"] = pays_from(ratios, name)
        if line["pays from"]:
            line["pays from"] += f", {pays_from(drawn, name)}"
        lines.append(line)
    return lines


def pays_from(ratios: "pd.Series[float]", name: str) -> str:
    """For a tree of two roles under `knowledge`: from how many tokens of the first role's responses, the second's
    having one, it has less variance than causal credit at equal tokens.
    """
    first, *branches = ESTIMATORS[name].fanouts[2]
    if branches == [1]:
        return ""
    responses = first * (1 + branches[0])
    variance = ratios[2, "knowledge", name] / responses
    of_causal = ratios[2, "knowledge", "causal"] / (2 * GROUP)
    # variance * (first * length + responses - first) < of_causal * (GROUP * length + GROUP)
    gain = of_causal * GROUP - variance * first
    return (
        f"{(variance * (responses - first) - of_causal * GROUP) / gain:.1f}"
        if gain > 0
        else "never"
    )


def span(values: "pd.Series[float]", form: str) -> str:
    """The least and the largest of some values; 0 where none is above rounding."""
    low, high = form.format(values.min()), form.format(values.max())
    if values.max() < 1e-6:
        return "0"
    return high if low == high else f"{low} to {high}"


# A colour for each idea, a marker for each estimator of it. Those that equal another are left out: `mean` and MAGRPO
# are `sum`, C3 with 4 x 2 is `causal, B = 2`.
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
    """Variance at equal tokens over reward structures, of two roles, by estimator: the whole chain, the first role."""
    figure, axes = plt.subplots(2, 1, figsize=(11, 8.4), sharex=True, layout="constrained")
    titles = {"": "Both roles", "_1": "The first role alone"}
    places = np.arange(len(STRUCTURES))
    for axis, (role, title) in zip(axes, titles.items(), strict=True):
        of_pairs = rows[rows["roles"] == 2]
        found = relative(of_pairs, f"at_equal_tokens{role}", f"angle{role}").loc[2]
        for i, (name, (colour, marker)) in enumerate(DRAWN.items()):
            of_name = found.xs(name, level="estimator").reindex(STRUCTURES)
            x = places + (i / (len(DRAWN) - 1) - 0.5) * 0.78
            for is_off in (False, True):
                shown = of_name["is_off"].to_numpy() == is_off
                axis.plot(
                    x[shown],
                    of_name["ratio"].to_numpy()[shown],
                    marker,
                    color=colour,
                    mfc="white" if is_off else colour,
                    ms=7,
                    mew=1.4,
                    zorder=3,
                )
            axis.plot([], [], marker, color=colour, ms=7, label=name)
        axis.axhline(1, color="0.35", lw=1, zorder=1)
        for edge in places[:-1] + 0.5:
            axis.axvline(edge, color="0.88", lw=1, zorder=0)
        axis.set(yscale="log", title=title, ylabel=f"variance at equal tokens, over {REFERENCE}'s")
        limits = axis.get_ylim()
        axis.set_yticks(TICKS, map(str, TICKS))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_ylim(limits)
        axis.grid(axis="y", color="0.93", zorder=0)
    axes[-1].set_xticks(places, STRUCTURES)
    axes[-1].set_xlim(-0.5, len(places) - 0.5)
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside right upper",
        title="hollow: the mean has another\ndirection than the gradient",
        frameon=False,
    )
    save(figure, path)


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.credit`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="Folder of rows.csv and variance.png"
    )
    parser.add_argument("--worlds", type=int, default=WORLDS, help="Chains of each structure")
    args = parser.parse_args(argv)
    started = time.monotonic()
    rows = audited(args.worlds)
    args.out.mkdir(parents=True, exist_ok=True)
    rows.to_csv(args.out / ROWS, index=False, float_format="%.10g")
    plot(rows, args.out / "variance.png")
    print(f"{len(rows)} rows in {args.out}, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main(command_line)
