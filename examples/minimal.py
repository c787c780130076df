"""CORY in one file: two copies of a language model, trained together by PPO.

    python examples/minimal.py      # two minutes on two CPU cores: a table, and a figure in runs/

The script implements Ma et al., "Coevolving with the Other You" (NeurIPS 2024, arXiv 2410.06101),
and cites its equations. The pioneer answers a query. The observer reads the query and the pioneer's
answer, then answers too. PPO updates both on the sum of their rewards, and every few iterations
they exchange roles.

The task is a toy: continue a film review so that a classifier finds it positive. Policy and
classifier are small models trained on generated reviews. For a task of your own, change `POLICY`,
`QUERIES`, `OBSERVER` and `load_reward`.

The script departs from the paper in its sizes, the learning rate and the KL penalty (`KL_PENALTY`).
It imports nothing from the package `cory`. A test checks that script and package
compute equal losses and updates from the same weights, responses and rewards
(tests/examples/test_minimal.py).
"""

import argparse
import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

# ---------------------------------------- Settings

ROOT = Path(__file__).resolve().parent.parent
POLICY = str(ROOT / "imdb_train/weights/policy")  # a folder, or an id on the Hugging Face Hub
REWARD_MODEL = str(ROOT / "imdb_train/weights/reward_model")
FIGURE = ROOT / "runs/minimal.png"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEED = 0

ITERATIONS = 100
BATCH = 64  # queries per iteration; the paper's Table 1: 256
RESPONSE_TOKENS = 10  # maximum
EXCHANGE_EVERY = 5  # iterations; T_REx

LEARNING_RATE = 1e-4  # Table 1: 1.41e-5
PPO_EPOCHS = 4
CLIP = 0.2  # clip range of the probability ratio
CLIP_VALUE = 0.2  # clip range of the values
VALUE_COEF = 0.1  # beta in Eq. 13
GAMMA = 1.0
LAMBDA = 0.95

# The KL coefficient, eta in Eq. 2, rises while responses have a mean KL above the target, and falls
# while it is below.
INIT_KL_COEF = 0.3
KL_TARGET = 6.0  # nats
KL_HORIZON = 10_000  # responses

# The KL in Eq. 2. "full", as the paper prints it, sums over the whole vocabulary. This sum is the
# same whichever token is sampled, so the penalty cannot act on the sampled token. "kl" is the sampled
# token's log-ratio, whose mean is the full KL. At this learning rate, "full" lets the policy run away
# from the reference.
KL_PENALTY = "kl"

# Queries are beginnings of reviews. The pioneer reads them unchanged.
OPENINGS = (
    "I watched {film}",
    "we saw {film}",
    "I finally rented {film}",
    "they showed {film}",
    "I knew little about {film}",
    "{film} came out",
    "{film} was on television",
    "after all the talk I went to see {film}",
)
FILMS = ("this film", "this movie", "the picture", "that thriller", "this comedy", "the drama")
QUERIES = [opening.format(film=film) for opening in OPENINGS for film in FILMS]

# The observer's prompt.
OBSERVER = 'I can make this sentence "{query}{response}" more positive: {query}'

# ---------------------------------------- Agents


@dataclass
class Agent:
    """An LLM with its value head and optimizer. Agents keep all of them when they exchange roles."""

    name: str
    policy: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    value_head: nn.Module
    optimizer: torch.optim.Optimizer
    kl_coef: float


def load_policy() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the pre-trained LLM and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked everywhere

    # In float32: the file's weights are float16, in which Adam's small steps would be rounded away.
    policy = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).to(DEVICE)

    # Always in evaluation mode: dropout would add noise to the ratio of Eq. 11.
    return policy.eval(), tokenizer


def make_agent(name: str, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Agent:
    """Makes an agent from a policy, with a new value head on the last hidden layer (Eq. 10)."""
    value_head = nn.Linear(policy.config.hidden_size, 1).to(policy.device)
    parameters = [*policy.parameters(), *value_head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE, fused=True)
    return Agent(name, policy, tokenizer, value_head, optimizer, INIT_KL_COEF)


# ---------------------------------------- Responses and rewards


@dataclass
class Rollout:
    """A batch of prompts (batch, P), padded on the left, and responses (batch, R), padded on the right.

    Masks are 1 at tokens and 0 at padding.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor


def respond(agent: Agent, prompts: list[str]) -> tuple[Rollout, list[str]]:
    """Samples a response to each prompt.

    Returns tokens for the agent's update, and texts for the other agent and the reward.
    """
    tokenizer = agent.tokenizer
    encoded = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    prompt_ids = encoded["input_ids"].to(agent.policy.device)
    prompt_mask = encoded["attention_mask"].to(agent.policy.device)

    # PPO needs samples from the policy's full distribution; `top_k` would be 50 by default.
    ids = agent.policy.generate(
        input_ids=prompt_ids,
        attention_mask=prompt_mask,
        max_new_tokens=RESPONSE_TOKENS,
        do_sample=True,
        top_k=0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    response_ids = ids[:, prompt_ids.shape[1] :]

    # A response ends with its first end token; later tokens are padding.
    is_end = (response_ids == tokenizer.eos_token_id).long()
    ends_before = is_end.cumsum(1) - is_end
    response_mask = (ends_before == 0).long()

    rollout = Rollout(prompt_ids, prompt_mask, response_ids, response_mask)
    return rollout, tokenizer.batch_decode(response_ids, skip_special_tokens=True)


# Maps queries and responses to task rewards r(s0, a), (batch,).
Reward = Callable[[list[str], list[str]], Tensor]


def load_reward() -> Reward:
    """Returns a reward function: the classifier's logit of POSITIVE for query and response."""
    tokenizer = AutoTokenizer.from_pretrained(REWARD_MODEL)
    classifier = AutoModelForSequenceClassification.from_pretrained(
        REWARD_MODEL, dtype=torch.float32
    )
    classifier = classifier.eval().to(DEVICE)
    positive = classifier.config.label2id["POSITIVE"]

    @torch.no_grad()
    def reward(queries: list[str], responses: list[str]) -> Tensor:
        texts = [query + response for query, response in zip(queries, responses, strict=True)]
        encoded = tokenizer(texts, padding=True, return_tensors="pt").to(DEVICE)
        logits = classifier(encoded["input_ids"], encoded["attention_mask"]).logits
        return logits[:, positive]

    return reward


# ---------------------------------------- PPO


def hidden_states(policy: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Returns the last hidden layer at the positions that predict response tokens, (batch, R, width)."""
    # The last token predicts nothing.
    ids = torch.cat([rollout.prompt_ids, rollout.response_ids], 1)[:, :-1]
    mask = torch.cat([rollout.prompt_mask, rollout.response_mask], 1)[:, :-1]
    # Padding on the left takes no positions.
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    hidden = policy.base_model(
        input_ids=ids, attention_mask=mask, position_ids=position_ids, use_cache=False
    ).last_hidden_state
    return hidden[:, -rollout.response_ids.shape[1] :]


def vocabulary_logprobs(policy: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Returns the log-probability of every token, (batch, R, vocabulary)."""
    return policy.get_output_embeddings()(hidden).float().log_softmax(-1)


def chosen(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    """Selects the log-probabilities of the response tokens, (batch, R)."""
    return logprobs.gather(-1, token_ids[..., None]).squeeze(-1)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Averages over all response tokens of the batch."""
    return (x * mask).sum() / mask.sum()


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shifts and scales to mean 0 and variance 1 over all response tokens of the batch."""
    centred = x - masked_mean(x, mask)
    variance = (centred.square() * mask).sum() / (mask.sum() - 1)
    return centred * torch.rsqrt(variance + 1e-8)


def gae(token_rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Eq. 12). All tensors are (batch, R).

    Returns the advantages, and the returns to which the values are fitted.
    """
    token_rewards = token_rewards * mask
    values = values * mask
    advantages = torch.zeros_like(values)
    next_advantage = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = token_rewards[:, t] + GAMMA * next_value - values[:, t]
        next_advantage = delta + GAMMA * LAMBDA * next_advantage  # Eq. 12
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def ppo_update(
    agent: Agent, reference: PreTrainedModel, rollout: Rollout, rewards: Tensor
) -> dict[str, float]:
    """Updates an agent on its responses (Eq. 2 and 10 to 13) and returns statistics.

    `rewards`: training rewards (batch,).
    """
    mask = rollout.response_mask
    token_ids = rollout.response_ids

    # 1. Log-probabilities under the policy that sampled the responses, and under the reference,
    # which reads the same prompts (Eq. 8).
    with torch.no_grad():
        hidden = hidden_states(agent.policy, rollout)
        oldvalue = agent.value_head(hidden).squeeze(-1).float()  # Eq. 10
        logprobs = vocabulary_logprobs(agent.policy, hidden)
        ref_logprobs = vocabulary_logprobs(reference, hidden_states(reference, rollout))
        oldlogprob = chosen(logprobs, token_ids)
        if KL_PENALTY == "full":
            kl = (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)
        else:
            kl = oldlogprob - chosen(ref_logprobs, token_ids)
        del logprobs, ref_logprobs  # the largest tensors

    # 2. Token rewards: the KL penalty at every token, and the response's reward at its last token.
    last_token = mask.sum(1, keepdim=True) - 1
    token_rewards = -agent.kl_coef * kl
    token_rewards = token_rewards.scatter_add(1, last_token, rewards[:, None])  # Eq. 2

    # 3. Advantages: the rewards from each token on, compared with the value head's prediction.
    advantages, returns = gae(token_rewards, oldvalue, mask)  # Eq. 12
    advantages = whiten(advantages, mask)

    # 4. A few gradient steps on the whole batch.
    policy_losses = []
    value_losses = []
    for _ in range(PPO_EPOCHS):
        hidden = hidden_states(agent.policy, rollout)
        newvalue = agent.value_head(hidden).squeeze(-1).float()  # Eq. 10
        newlogprob = chosen(vocabulary_logprobs(agent.policy, hidden), token_ids)

        # Policy loss: raises the probability of tokens with a positive advantage and lowers it for
        # those with a negative one. Clipping stops a token's gradient once its ratio has moved far
        # enough. Padding is masked before `exp`, which could overflow.
        ratio = ((newlogprob - oldlogprob) * mask).exp()
        pg_loss1 = -advantages * ratio
        pg_loss2 = -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)
        pg_loss = masked_mean(torch.max(pg_loss1, pg_loss2), mask)  # Eq. 11

        # Value loss: the larger of two squared errors, of the new value and of the new value clipped
        # around the old one.
        v_clipped = oldvalue + (newvalue - oldvalue).clamp(-CLIP_VALUE, CLIP_VALUE)
        v_loss1 = (newvalue - returns).square()
        v_loss2 = (v_clipped - returns).square()
        v_loss = 0.5 * masked_mean(torch.max(v_loss1, v_loss2), mask)

        # The paper maximizes -loss.
        loss = pg_loss + VALUE_COEF * v_loss  # Eq. 13
        loss.backward()
        agent.optimizer.step()
        agent.optimizer.zero_grad()

        policy_losses.append(pg_loss.item())
        value_losses.append(v_loss.item())

    # 5. The mean KL of a response, to which the KL coefficient adapts.
    mean_kl = (kl * mask).sum(1).mean().item()
    stats = {
        "kl": mean_kl,
        "kl_coef": agent.kl_coef,
        "policy_loss": sum(policy_losses) / PPO_EPOCHS,
        "value_loss": sum(value_losses) / PPO_EPOCHS,
    }
    error = min(max(mean_kl / KL_TARGET - 1, -0.2), 0.2)
    agent.kl_coef *= 1 + error * len(rewards) / KL_HORIZON
    return stats


# ---------------------------------------- CORY


def roles(agents: list[Agent], k: int) -> list[Agent]:
    """Returns the pioneer and the observer of iteration `k`."""
    return agents if (k // EXCHANGE_EVERY) % 2 == 0 else agents[::-1]  # Eq. 5


def iteration(
    pioneer: Agent,
    observer: Agent,
    reference: PreTrainedModel,
    reward: Reward,
    queries: list[str],
) -> list[dict[str, float]]:
    """Runs an iteration of Algorithm 1 and returns the pioneer's and the observer's statistics."""
    # Knowledge transfer (Eq. 3): the observer also reads the pioneer's response.
    rollout1, responses1 = respond(pioneer, queries)  # a1 ~ pi_pio(.|s0)
    prompts = [
        OBSERVER.format(query=query, response=response)
        for query, response in zip(queries, responses1, strict=True)
    ]
    rollout2, responses2 = respond(observer, prompts)  # a2 ~ pi_obs(.|s0, a1)

    # Collective reward: both agents earn the sum.
    task_rewards1 = reward(queries, responses1)
    task_rewards2 = reward(queries, responses2)
    rewards = task_rewards1 + task_rewards2  # Eq. 4

    # Each agent learns from its own responses.
    stats1 = ppo_update(pioneer, reference, rollout1, rewards)
    stats2 = ppo_update(observer, reference, rollout2, rewards)
    stats1["task_reward"] = task_rewards1.mean().item()
    stats2["task_reward"] = task_rewards2.mean().item()
    return [stats1, stats2]


def main() -> None:
    """Trains two agents, prints a table and draws a figure."""
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    started = time.perf_counter()

    # Two copies of one LLM, and one frozen reference for both.
    policy, tokenizer = load_policy()
    agents = [make_agent(f"LLM {n}", copy.deepcopy(policy), tokenizer) for n in (1, 2)]
    reference = policy.requires_grad_(False)
    reward = load_reward()

    history = []
    print("iteration  role      agent  task reward     KL  policy loss  value loss")
    for k in range(ITERATIONS):
        pioneer, observer = roles(agents, k)
        queries = rng.choices(QUERIES, k=BATCH)
        stats = iteration(pioneer, observer, reference, reward, queries)
        history.append(stats)
        if k == 0 or (k + 1) % EXCHANGE_EVERY == 0:
            print_row(k, "pioneer", pioneer.name, stats[0])
            print_row(k, "observer", observer.name, stats[1])

    draw(history)
    print(f"{time.perf_counter() - started:.0f} seconds. Curves: {FIGURE}")


def print_row(k: int, role: str, name: str, stats: dict[str, float]) -> None:
    """Prints a row of the table."""
    print(
        f"{k + 1:9}  {role:8}  {name}  {stats['task_reward']:11.2f}  {stats['kl']:5.2f}"
        f"  {stats['policy_loss']:11.4f}  {stats['value_loss']:10.4f}",
        flush=True,
    )


def draw(history: list[list[dict[str, float]]]) -> None:
    """Draws the curves of the paper's Fig. 3, by role: task reward, KL, and both combined."""
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    panels = figure.subplots(1, 3)
    for index, role in enumerate(("pioneer", "observer")):
        task_rewards = [stats[index]["task_reward"] for stats in history]
        kls = [stats[index]["kl"] for stats in history]
        combined = [r - INIT_KL_COEF * kl for r, kl in zip(task_rewards, kls, strict=True)]
        panels[0].plot(task_rewards, label=role)
        panels[1].plot(kls)
        panels[2].plot(combined)

    titles = ("task reward", "KL (nats per response)", "task reward - eta * KL")
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title)
        panel.set_xlabel("iteration")
    panels[0].legend()
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=120)


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=raw).parse_args()
    main()
