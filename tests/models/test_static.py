"""A static cache: what is sampled with it is what is sampled with the dynamic one, in shapes that stay."""

import pytest
import torch
from conftest import make_gpt2, run_iteration
from peft import LoraConfig, get_peft_model
from test_families import ATTENTION
from test_lora import make_trainer
from torch._dynamo.testing import CompileCounter
from transformers import AutoConfig, AutoModelForCausalLM

from cory.config import SamplingConfig
from cory.errors import UserError
from cory.models import static
from cory.models.sampling import sample
from cory.models.static import check_static
from cory.models.window import BY_POSITIONS

CPU = torch.device("cpu")
ENDS = range(5, 11)  # of 100 tokens, so that rows leave at every length


@pytest.fixture
def programs(monkeypatch):
    """Counts the programs that are traced; they run as they are, as a compiler takes its time."""
    torch._dynamo.reset()
    counter = CompileCounter()
    traced = torch.compile(static.step, fullgraph=True, dynamic=False, backend=counter)
    monkeypatch.setattr(static, "compiled_step", lambda: traced)
    return counter


def make_model(name, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **(ATTENTION[name] | changes))
    return AutoModelForCausalLM.from_config(config).eval()


def draw_queries(*lengths):
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(11, 100, (length,), generator=generator) for length in lengths]


def sampled(model, tokenizer, queries, longest=20, ends=ENDS, **settings):
    """Responses, and the logits (tokens, vocabulary) of each."""
    generator = torch.Generator().manual_seed(7)
    settings = SamplingConfig(max_new_tokens=longest, **settings)
    responses, logits = sample(
        model, tokenizer, queries, settings, longest, generator, ends=ends, keep_logits=True
    )
    return responses, [torch.stack(row).float() for row in logits]


def assert_equal(model, tokenizer, queries, tolerance=1e-5, **options):
    expected, expected_logits = sampled(model, tokenizer, queries, **options)
    responses, logits = sampled(model, tokenizer, queries, cache="static", **options)
    assert [row.tolist() for row in responses] == [row.tolist() for row in expected]
    torch.testing.assert_close(
        torch.cat(logits), torch.cat(expected_logits), rtol=tolerance, atol=tolerance
    )
    return responses


@pytest.mark.parametrize("name", BY_POSITIONS)
def test_it_samples_what_the_dynamic_cache_samples(name, tokenizer, programs):
    model = make_model(name)
    queries = draw_queries(3, 9, 5, 7, 2, 9, 4, 4, 6, 1)
    queries += [queries[1], queries[5], queries[0]]
    responses = assert_equal(model, tokenizer, queries)
    assert len({len(response) for response in responses}) > 4
    assert programs.frame_count > 1  # of 16 rows, and of fewer


def test_prompts_of_one_length_with_warpers_and_stems(tokenizer, programs):
    model = make_model("llama")
    queries = draw_queries(*[6] * 9)
    assert_equal(model, tokenizer, queries)
    assert_equal(model, tokenizer, queries, temperature=0.7, top_k=20, repetition_penalty=1.3)
    start = draw_queries(12)[0]
    assert_equal(model, tokenizer, [torch.cat([start, query]) for query in queries])


def test_what_was_in_the_buffers_does_not_count(tokenizer, programs):
    """A batch after a larger one, and of rows that are not finite."""
    model = make_model("qwen2")
    sampled(model, tokenizer, draw_queries(*range(1, 21)), cache="static")
    for layer in static._BUFFERS[model].layers:
        for room in layer:
            room.fill_(torch.nan)
    assert_equal(model, tokenizer, draw_queries(4, 2, 5))


def test_rows_that_nobody_reads_stay_within_the_positions_of_the_model(tokenizer, programs):
    model = make_model("gpt2", n_positions=30)
    for _ in range(4):
        assert_equal(model, tokenizer, draw_queries(10, 3, 7), longest=20, ends=())


def test_batches_and_models_share_programs_and_buffers(tokenizer, programs):
    model = make_model("llama")
    sampled(model, tokenizer, draw_queries(*range(1, 33)), cache="static")
    traced = programs.frame_count
    addresses = [room.data_ptr() for layer in static._BUFFERS[model].layers for room in layer]
    for query in model.parameters():
        query.data += 0.01  # as after an update
    assert_equal(model, tokenizer, draw_queries(*range(11, 37)))
    after = [room.data_ptr() for layer in static._BUFFERS[model].layers for room in layer]
    assert after == addresses
    assert_equal(make_model("llama"), tokenizer, draw_queries(*range(1, 33)))
    assert programs.frame_count == traced


def test_adapters_are_those_that_are_active(tokenizer, programs):
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    model = get_peft_model(make_model("llama"), settings, adapter_name="one")
    model.add_adapter("two", settings)
    model.eval()
    queries = draw_queries(3, 5, 8)
    by_adapter = []
    for name in ("one", "two"):
        model.set_adapter(name)
        by_adapter.append(torch.cat(assert_equal(model, tokenizer, queries)).tolist())
    with model.disable_adapter():
        by_adapter.append(torch.cat(assert_equal(model, tokenizer, queries)).tolist())
    assert by_adapter[0] != by_adapter[1] != by_adapter[2] != by_adapter[0]


def test_bfloat16(tokenizer, programs):
    """Keys that autocast leaves in float32 beside values in bfloat16, and weights in bfloat16."""
    model = make_model("llama")
    with torch.autocast("cpu", torch.bfloat16):
        expected = sampled(model, tokenizer, draw_queries(3, 5, 8), ends=())[1]
        logits = sampled(model, tokenizer, draw_queries(3, 5, 8), ends=(), cache="static")[1]
    torch.testing.assert_close(logits[0][:2], expected[0][:2], rtol=0.05, atol=0.05)
    model = make_model("llama").to(torch.bfloat16)
    expected = sampled(model, tokenizer, draw_queries(3, 5, 8), ends=())[1]
    logits = sampled(model, tokenizer, draw_queries(3, 5, 8), ends=(), cache="static")[1]
    torch.testing.assert_close(logits[0][:2], expected[0][:2], rtol=0.05, atol=0.05)


def test_compiled(tokenizer):
    torch._dynamo.reset()
    model = make_model("llama")
    try:
        check_static(model, CPU)
    except UserError as error:
        assert "torch.compile fails here" in str(error)
        pytest.skip(str(error))
    assert_equal(model, tokenizer, draw_queries(3, 5, 8))


def test_a_run_trains_with_it(config, programs):
    """Responses are the same; log-probabilities differ by rounding."""
    records = {}
    for cache in ("dynamic", "static"):
        config.sampling.cache = cache
        trainer = make_trainer(config)
        records[cache] = [record for k in range(2) for record in run_iteration(trainer, k)]
    assert programs.frame_count > 0
    for record, expected in zip(records["static"], records["dynamic"], strict=True):
        for metric in ("task_reward", "kl", "entropy"):
            assert record[metric] == pytest.approx(expected[metric], abs=1e-5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: make_model("mistral"), "a model of type mistral"),
        (lambda: make_model("llama", attn_implementation="eager"), "eager attention"),
    ],
)
def test_what_it_cannot_do_is_refused(model, message, tokenizer):
    with pytest.raises(
        UserError, match=f"^sampling.cache: expected dynamic with {message}, got static$"
    ):
        check_static(model(), CPU)
    with pytest.raises(UserError, match=r"^sampling\.cache: expected"):
        sampled(model(), tokenizer, draw_queries(3), cache="static")


def test_a_machine_without_a_compiler_is_told(tokenizer, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("No working C++ compiler found\nand so on")

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(UserError, match=r"fails here \(No working C\+\+ compiler found\), got"):
        check_static(make_gpt2(tokenizer), CPU)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"sampling": {"engine": "vllm"}}, "sampling.engine: vllm"),
        ({"parallel": {"shard": "full"}}, "parallel.shard: full"),
        ({"model": {"quantization": "4bit"}, "lora": {"rank": 4}}, "model.quantization: 4bit"),
    ],
)
def test_settings_beside_which_it_is_refused(config, flags, reason):
    config.sampling.cache = "static"
    for block, settings in flags.items():
        for key, value in settings.items():
            setattr(getattr(config, block), key, value)
    with pytest.raises(UserError, match=f"^sampling.cache: expected dynamic with {reason}"):
        config.check()
