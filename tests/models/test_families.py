"""Model families: sampling and training give each text's own log-probabilities, or the model is refused."""

import numpy as np
import pytest
import torch
from tiny_models import IDS, NARROW, SIZE, tiny
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from cory.build import make_agents
from cory.config import SamplingConfig
from cory.errors import UserError
from cory.models import families
from cory.models.families import TESTED, check_model
from cory.models.load import load_answering
from cory.models.sample import sample
from cory.models.window import forward, pack

GPT2 = IDS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}
WINDOW = {"sliding_window": 6}  # shorter than the texts
MIXED = ["sliding_attention", "full_attention"]
RECURRENT = ["linear_attention", "full_attention"]
HEADS = {"num_attention_heads": 4, "ffn_hidden_size": 48}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

# Families that runs accept without a check, some of them in two variants.
ATTENTION = {
    "gpt2": GPT2,
    "gptj": GPT2 | {"rotary_dim": 4},
    "gpt_neo": NARROW
    | {
        "window_size": 6,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
    },
    "gpt_neox": SIZE,
    "llama": SIZE,
    "mistral": SIZE | WINDOW,
    "mixtral": SIZE | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "gemma2": SIZE | WINDOW | {"layer_types": MIXED},
    "gemma3_text": SIZE | WINDOW | {"layer_types": MIXED},
    "opt": NARROW
    | {"num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3},
    "bloom": NARROW | {"n_head": 4, "n_layer": 2},
    "falcon": NARROW | HEADS,
    "falcon with alibi": NARROW | HEADS | {"alibi": True},
    "olmo2": SIZE,
    "phi": SIZE,
    "phi3": SIZE | WINDOW,
    "qwen2": SIZE,
    "qwen2 with a window": SIZE | WINDOW | {"use_sliding_window": True, "max_window_layers": 0},
    "qwen3": SIZE,
    "qwen3_moe": SIZE | EXPERTS | {"moe_intermediate_size": 16},
    "smollm3": SIZE,
}
# Families that keep a state besides keys and values.
STATES = {
    "mamba": IDS | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "mamba2": IDS | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8}
    | {"n_groups": 2, "chunk_size": 8},
    "lfm2": SIZE | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "jamba": SIZE | EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
    | {"mamba_d_state": 8, "mamba_dt_rank": 8},
    "qwen3_next": SIZE | EXPERTS | LINEAR | {"layer_types": RECURRENT, "moe_intermediate_size": 16}
    | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": SIZE | LINEAR | {"layer_types": RECURRENT},
}  # fmt: skip
# Families that read padding as text, in every pass or only in sampling.
REFUSED = {
    "rwkv": IDS
    | {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "attention_hidden_size": 32,
        "intermediate_size": 48,
    },
    "xlnet": IDS | {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    "recurrent_gemma": SIZE
    | {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16},
    "minimax": SIZE
    | {"layer_types": RECURRENT, "block_size": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
}
ALL = ATTENTION | STATES | REFUSED


class Tokenizer:
    """The part of a tokenizer that sampling uses. Token ids are decoded as numbers."""

    pad_token_id = 0

    def __call__(self, text, **_):
        return {"input_ids": []}

    @staticmethod
    def decode(ids, **_):
        return " ".join(map(str, ids)) + " "


def random_ids(*lengths):
    torch.manual_seed(1)
    return [torch.randint(3, 99, (length,)) for length in lengths]


@torch.no_grad()
def alone(model, query, response):
    """Returns the log-probabilities (tokens, vocabulary) along a response, from one pass over the text."""
    text = torch.cat([query, response])
    return model(input_ids=text[None]).logits[0, len(query) - 1 : -1].log_softmax(-1)


def test_all_families_that_are_accepted_without_a_check_are_tested_here():
    assert {name.split(" ")[0] for name in ATTENTION} == set(TESTED)


@pytest.mark.parametrize("name", [*ATTENTION, *STATES])
def test_padded_batches_give_the_log_probabilities_of_each_text_alone(name):
    """In sampling and in training's forward passes."""
    model, queries = tiny(name, **ALL[name]), random_ids(3, 9, 14, 1)
    queries.append(queries[1].clone())
    settings = SamplingConfig(1, 10, temperature=1.3)
    ends = range(0, 100, 9)  # many end tokens, so that rows end at different times

    def draw():
        generator = torch.Generator().manual_seed(5)
        return sample(model, Tokenizer(), queries, settings, generator, ends=ends, keep_logits=True)

    (responses, seen), (again, _) = draw(), draw()
    assert len({len(response) for response in responses}) > 1
    batch = pack(queries, responses, 0)
    passes = forward(model, *batch[:3], batch.response_ids.shape[1])[0].log_softmax(-1)
    for i, (query, response) in enumerate(zip(queries, responses, strict=True)):
        assert torch.equal(response, again[i])
        expected = alone(model, query, response)
        sampled = torch.stack(seen[i]).log_softmax(-1)
        for logprobs in (sampled, passes[i, : len(response)]):
            torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mamba", "qwen3_next"])
def test_padding_changes_no_gradient(name):
    model = tiny(name, **ALL[name])
    queries, responses = random_ids(3, 9, 14), random_ids(4, 1, 7)

    def gradients(groups):
        model.zero_grad()
        for group in groups:
            batch = pack([queries[i] for i in group], [responses[i] for i in group], 0)
            logprobs = forward(model, *batch[:3], batch.response_ids.shape[1])[0].log_softmax(-1)
            (
                logprobs.gather(-1, batch.response_ids[..., None])[..., 0] * batch.response_mask
            ).sum().backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    together, one_by_one = gradients([[0, 1, 2]]), gradients([[0], [1], [2]])
    assert together
    for key, gradient in together.items():
        torch.testing.assert_close(gradient, one_by_one[key], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        SamplingConfig(temperature=1.5, top_k=50, top_p=0.9, repetition_penalty=1.1),
        SamplingConfig(stop=["7 ", "30"]),
    ],
)
def test_generate_draws_the_same_tokens_as_corys_sampling_loop(settings, monkeypatch):
    model, queries = tiny("llama", **SIZE), random_ids(3, 9, 14, 5)
    model.generation_config = GenerationConfig(
        temperature=0.1, top_k=1, max_length=3, suppress_tokens=[5, 6]
    )
    ends = () if settings.stop else (50,)

    def draw():
        generator = torch.Generator().manual_seed(11)
        return sample(model, Tokenizer(), queries, settings, generator, ends=ends, keep_logits=True)

    drawn, drawn_logits = draw()
    monkeypatch.setattr("cory.models.sample.keeps_keys_and_values", lambda model: False)
    generation_config = model.generation_config
    generated, generated_logits = draw()
    assert model.generation_config is generation_config
    # Both draw the same random numbers until the loop drops the first finished row.
    same = min(map(len, drawn))
    assert same > 1
    rows = zip(drawn, generated, drawn_logits, generated_logits, strict=True)
    for response, expected, logits, expected_logits in rows:
        assert torch.equal(response[:same], expected[:same])
        assert len(expected_logits) == len(expected)
        torch.testing.assert_close(
            torch.stack(logits[:same]), torch.stack(expected_logits[:same]), rtol=0, atol=1e-4
        )


def test_generate_ends_rows_as_corys_sampling_loop_does(monkeypatch):
    """Decoding is greedy, so random numbers play no part."""
    model, queries, likeliest = (
        tiny("llama", **SIZE),
        random_ids(3, 9, 14, 5, 8, 2),
        SamplingConfig(1, 20, top_k=1),
    )
    free = sample(model, Tokenizer(), queries, likeliest, torch.Generator(), ends=()).responses
    ends = [int(row[t]) for row, t in zip(free, (1, 3, 6, 9), strict=False)]
    stop = [f" {int(free[4][4])} {int(free[4][5])} "]
    settings = SamplingConfig(1, 20, top_k=1, stop=stop)
    expected = sample(model, Tokenizer(), queries, settings, torch.Generator(), ends=ends).responses
    monkeypatch.setattr("cory.models.sample.keeps_keys_and_values", lambda model: False)
    generated = sample(model, Tokenizer(), queries, settings, torch.Generator(), ends=ends)
    assert len({len(row) for row in expected}) > 3
    for row, expected_row in zip(generated.responses, expected, strict=True):
        assert torch.equal(row, expected_row)


@pytest.mark.parametrize("name", ["gpt2", "jamba"])
def test_a_check_draws_no_random_number(name, monkeypatch):
    """The check of a family leaves the random state as it was, if the model passes."""
    monkeypatch.setattr(families, "TESTED", ())
    model, before = tiny(name, **ALL[name]), torch.get_rng_state()
    check_model(model, Tokenizer())
    assert torch.equal(torch.get_rng_state(), before)


def saved(name, tokenizer, folder):
    torch.manual_seed(0)
    settings = ALL[name] | {"vocab_size": len(tokenizer), "eos_token_id": 0}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_reads_padding_is_refused(config, tokenizer, tmp_path, name):
    """It neither trains nor answers. If an engine samples, only the forward passes must ignore padding."""
    config.model.name = saved(name, tokenizer, tmp_path / "model")
    config.algorithm = "reinforce"  # needs no value head, which TRL makes for few families
    refused = rf"^model\.name: .* depend on padding, got one of type {name}: "
    with pytest.raises(UserError, match=refused):
        make_agents(config)
    with pytest.raises(UserError, match=refused):
        load_answering(config.model, torch.device("cpu"))
    model = tiny(name, **ALL[name])
    if name in ("rwkv", "xlnet"):
        with pytest.raises(UserError, match="in a padded batch, its log-probabilities differ"):
            check_model(model, Tokenizer(), samples=False)
    else:
        check_model(model, Tokenizer(), samples=False)
        with pytest.raises(UserError, match="while sampling in a padded batch, its"):
            check_model(model, Tokenizer())


def test_agents_of_mamba_train(config, tokenizer, tmp_path):
    config.model.name, config.lora.rank = saved("mamba", tokenizer, tmp_path / "model"), 4
    with pytest.raises(UserError, match=r"^lora\.target_modules: "):  # out_proj takes no adapter
        make_agents(config)
    config.lora.target_modules = ["in_proj", "x_proj"]
    agent = make_agents(config)[0]

    def answers():
        prompts = ["the film was", "a", "some very fine acting"] * 2 + ["bad", "good story"]
        return agent.respond(prompts, SamplingConfig(1, 6), torch.Generator().manual_seed(3))

    rollout = answers()
    assert answers().completions == rollout.completions
    before = [p.detach().clone() for p in agent.policy.parameters() if p.requires_grad]
    (stats,) = agent.learn([rollout], [torch.arange(8.0)], np.random.default_rng(0))
    assert stats.kl == pytest.approx(0, abs=1e-5)  # the policy has not been updated yet
    after = [p for p in agent.policy.parameters() if p.requires_grad]
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
