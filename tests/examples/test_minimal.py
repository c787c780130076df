"""examples/minimal.py computes the same numbers as the package from equal weights, responses and rewards."""

import importlib.util
import subprocess
import sys
import zlib

import pytest
import torch
from conftest import ROOT

from cory.build import make_agents
from cory.config import Config, CoryConfig, PPOConfig
from cory.models.sample import Sampled
from cory.roles import RolePrompts
from cory.task import Task
from cory.trainer import CoryTrainer

BATCH = 12
LONGEST = 7
END = 0  # end token of the shipped toy policy
STATISTICS = ("kl", "kl_coef", "policy_loss", "value_loss")


@pytest.fixture
def minimal():
    """A fresh import of the example, whose settings a test may change."""
    spec = importlib.util.spec_from_file_location("minimal", ROOT / "examples/minimal.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.DEVICE = "cpu"
    return module


def make_trainer(minimal, **ppo):
    """Returns the package's trainer with the example's settings."""
    config = Config(
        device="cpu",
        cory=CoryConfig(exchange_period=minimal.EXCHANGE_EVERY),
        ppo=PPOConfig(
            learning_rate=minimal.LEARNING_RATE,
            batch_size=BATCH,
            mini_batch_size=BATCH,
            ppo_epochs=minimal.PPO_EPOCHS,
            cliprange=minimal.CLIP,
            cliprange_value=minimal.CLIP_VALUE,
            vf_coef=minimal.VALUE_COEF,
            gamma=minimal.GAMMA,
            lam=minimal.LAMBDA,
            init_kl_coef=minimal.INIT_KL_COEF,
            kl_target=minimal.KL_TARGET,
            kl_horizon=minimal.KL_HORIZON,
            kl_penalty=minimal.KL_PENALTY,
            ratio_threshold=1e9,  # TRL's guard, which the example leaves out
        ),
    )
    config.model.name = minimal.POLICY
    prompts = RolePrompts(observer=minimal.OBSERVER.replace("{query}", "{prompt}"))
    task = Task.from_prompts(minimal.QUERIES, scores, prompts)
    return CoryTrainer(config, make_agents(config), task)


def make_agents_of_example(minimal, trainer):
    """Returns the example's agents with the initial value heads of the package's agents."""
    agents = [minimal.make_agent(agent.name, *minimal.load_policy()) for agent in trainer.agents]
    for agent, package_agent in zip(agents, trainer.agents, strict=True):
        head = package_agent.learner.model.v_head.summary
        agent.value_head.load_state_dict(head.state_dict())
    return agents


def scores(prompts, completions, **_):
    """A reward between -2 and 2 that depends on every letter of query and response."""
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    return [zlib.crc32(text.encode()) / 2**30 - 2 for text in texts]


def draw_responses(generator, ragged):
    """Draws a batch of responses. If `ragged`, all rows except the first end early with an end token."""
    # The package drops an incomplete trailing character, so only tokens of whole characters are drawn.
    responses = torch.randint(258, 800, (BATCH, LONGEST), generator=generator)
    if not ragged:
        return list(responses)
    lengths = torch.randint(1, LONGEST + 1, (BATCH,), generator=generator)
    lengths[0] = LONGEST
    for row, length in zip(responses[1:], lengths[1:], strict=True):
        row[length - 1] = END
    return [row[:length] for row, length in zip(responses, lengths, strict=True)]


def feed(minimal, monkeypatch, agents):
    """Makes package and example take each role's responses from the returned list, which the test fills."""
    fed = []
    for_package, for_example = iter(fed), iter(fed)
    monkeypatch.setattr(
        "cory.agent.sample", lambda *args, **options: Sampled(next(for_package), [])
    )

    def generate(input_ids, pad_token_id, do_sample, top_k, **_):
        assert do_sample and top_k == 0  # sampling from the policy's full distribution
        padded = torch.nn.utils.rnn.pad_sequence(next(for_example), True, pad_token_id)
        return torch.cat([input_ids, padded], 1)

    for agent in agents:
        agent.policy.generate = generate
    return fed


def assert_same_weights(agents, trainer):
    """Compares the policies and value heads of all agents."""
    for agent, package_agent in zip(agents, trainer.agents, strict=True):
        model = package_agent.learner.model
        heads = {"weight": model.v_head.summary.weight, "bias": model.v_head.summary.bias}
        for name, parameter in [
            *agent.policy.named_parameters(),
            *agent.value_head.named_parameters(),
        ]:
            other = heads[name] if name in heads else model.pretrained_model.get_parameter(name)
            difference = (parameter - other).abs()
            if name.endswith("c_attn.bias"):
                # The softmax cancels the keys' bias, so its gradient is zero and Adam turns
                # rounding errors into steps.
                queries, keys, values = difference.chunk(3)
                assert keys.max() < 1e-2, name
                difference = torch.cat([queries, values])
            assert difference.max() < 1e-4, name


@pytest.mark.parametrize(("kl_penalty", "ragged"), [("kl", True), ("full", False)])
def test_three_iterations_equal_the_packages(minimal, monkeypatch, kl_penalty, ragged):
    minimal.KL_PENALTY = kl_penalty
    minimal.EXCHANGE_EVERY = 2
    trainer = make_trainer(minimal)
    agents = make_agents_of_example(minimal, trainer)
    reference = minimal.load_policy()[0].requires_grad_(False)
    before = torch.cat([p.detach().flatten().clone() for p in agents[0].policy.parameters()])
    fed = feed(minimal, monkeypatch, agents)
    generator = torch.Generator().manual_seed(0)

    def reward(queries, responses):
        return torch.tensor(scores(queries, responses))

    for k in range(3):
        fed += [draw_responses(generator, ragged) for _ in range(2)]
        done = trainer.iteration(k)
        queries = trainer.task.batch(k, BATCH, trainer.config.seed)["prompt"]
        pioneer, observer = minimal.roles(agents, k)
        example_stats = minimal.iteration(pioneer, observer, reference, reward, queries)

        assert [pioneer.name, observer.name] == [agent.name for agent in done.chain]
        for stats, package_stats, rewards in zip(
            example_stats, done.stats, done.task_rewards, strict=True
        ):
            assert stats["task_reward"] == pytest.approx(rewards.mean().item(), abs=1e-6)
            for name in STATISTICS:
                expected = getattr(package_stats, name)
                assert stats[name] == pytest.approx(expected, rel=1e-4, abs=1e-5), name

    assert_same_weights(agents, trainer)
    after = torch.cat([p.detach().flatten() for p in agents[0].policy.parameters()])
    assert (after - before).abs().max() > 1e-3


def test_the_program_trains_and_draws_a_figure(minimal, monkeypatch, tmp_path, capsys):
    """Two iterations with a role exchange between them."""
    minimal.ITERATIONS = 2
    minimal.BATCH = 4
    minimal.EXCHANGE_EVERY = 1
    minimal.FIGURE = tmp_path / "minimal.png"
    minimal.main()
    rows = [line.split()[1:4] for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert rows == [
        ["pioneer", "LLM", "1"],
        ["observer", "LLM", "2"],
        ["pioneer", "LLM", "2"],
        ["observer", "LLM", "1"],
    ]
    assert minimal.FIGURE.exists()


def test_help_and_a_wrong_flag_train_nothing():
    script = [sys.executable, "examples/minimal.py"]
    helped = subprocess.run([*script, "--help"], capture_output=True, text=True, cwd=ROOT)
    assert helped.returncode == 0
    assert "CORY in one file" in helped.stdout and "iteration  role" not in helped.stdout
    refused = subprocess.run(
        [*script, "--iterations", "3"], capture_output=True, text=True, cwd=ROOT
    )
    assert refused.returncode == 2 and "--iterations" in refused.stderr and not refused.stdout
