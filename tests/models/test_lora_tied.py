"""LoRA on a head or embedding is refused if the two are tied, since the saved adapter would load as another model."""

import json

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cory.config import LoraConfig, ModelConfig
from cory.errors import UserError
from cory.models.load import load_policy
from cory.models.lora import add_adapter, save_policy

POLICY = "imdb_train/weights/policy"  # a GPT-2 with a tied head
IDS = torch.arange(5, 15)[None]


def make_llama(folder, tied):
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, initializer_range=0.3, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("target", ["lm_head", "wte"])
def test_a_tied_module_is_refused(target):
    policy, _ = load_policy(ModelConfig(POLICY))
    with pytest.raises(UserError, match=rf"^lora\.target_modules: .*{target}"):
        add_adapter(policy, "agent_1", LoraConfig(rank=2, target_modules=["c_attn", target]))


def test_a_saved_adapter_on_a_tied_module_is_refused(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(make_llama(tmp_path / "base", tied=True))
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "lm_head"])
    peft.get_peft_model(base, settings).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"^model\.name: .*lm_head"):
        load_policy(ModelConfig(str(tmp_path / "adapter")))


def test_adapters_on_an_untied_head_and_embedding_load_as_they_were_trained(tmp_path):
    base = make_llama(tmp_path / "base", tied=False)
    policy, _ = load_policy(ModelConfig(base))
    lora = LoraConfig(rank=2, target_modules=["q_proj", "lm_head", "embed_tokens"])
    policy = add_adapter(policy, "agent_1", lora)
    for name, weight in policy.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, 0.3)
    save_policy(policy, tmp_path / "agent_1", "agent_1")
    settings = tmp_path / "agent_1" / "adapter_config.json"
    changed = json.loads(settings.read_text()) | {"base_model_name_or_path": base}
    settings.write_text(json.dumps(changed))
    loaded, _ = load_policy(ModelConfig(str(tmp_path / "agent_1")))
    torch.testing.assert_close(logits(loaded), logits(policy), rtol=1e-3, atol=1e-3)


def test_tokens_that_an_adapter_trains_are_merged_into_both_tied_modules(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(make_llama(tmp_path / "base", tied=True))
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], trainable_token_indices=[5, 6]
    )
    policy = peft.get_peft_model(base, settings)
    for name, weight in policy.named_parameters():
        if "trainable_tokens" in name:
            weight.data.normal_(0, 0.3)
    policy.save_pretrained(tmp_path / "adapter")
    loaded, _ = load_policy(ModelConfig(str(tmp_path / "adapter")))
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    torch.testing.assert_close(logits(loaded), logits(policy), rtol=1e-3, atol=1e-3)


def test_a_prompt_tuning_adapter_is_refused(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(make_llama(tmp_path / "base", tied=True))
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    peft.get_peft_model(base, settings).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"^model\.name: .*prompt"):
        load_policy(ModelConfig(str(tmp_path / "adapter")))


def test_a_tied_head_that_an_adapter_saves_whole_is_loaded(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(make_llama(tmp_path / "base", tied=True))
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"]
    )
    policy = peft.get_peft_model(base, settings)
    policy.get_output_embeddings().modules_to_save["default"].weight.data.normal_(0, 0.3)
    policy.save_pretrained(tmp_path / "adapter")
    loaded, _ = load_policy(ModelConfig(str(tmp_path / "adapter")))
    torch.testing.assert_close(logits(loaded), logits(policy), rtol=1e-3, atol=1e-3)
