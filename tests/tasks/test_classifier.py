"""A classifier with any kind of head gives a text the same score alone and in a batch."""

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from cory.errors import UserError
from cory.rewards import Classifier
from imdb_train import toy
from imdb_train.config import ImdbConfig
from imdb_train.task import make_task

PROMPTS = ["the film was", "i liked", "bad", "a plot of great length"]
COMPLETIONS = [" good", " it a lot and would watch it again with my wife", "", " and no end"]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
}


@pytest.mark.parametrize(
    ("family", "pad", "labels"),
    [
        ("GPT2", "none", 1),
        ("GPT2", "end", 3),
        ("GPT2", "another", 1),
        ("GPT2", "beyond the vocabulary", 3),
        ("Llama", "end", 3),
        ("Llama", "another", 1),
        ("Bert", "end", 3),
        ("FNet", "another", 1),
    ],
)
def test_a_text_is_scored_in_a_batch_as_alone(tmp_path, family, pad, labels):
    tokenizer = AutoTokenizer.from_pretrained("imdb_train/weights/policy")
    end = tokenizer.eos_token_id
    pads = {"none": None, "end": end, "another": 7, "beyond the vocabulary": -1}
    assert tokenizer.pad_token_id not in pads.values()
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer), num_labels=labels, eos_token_id=end, bos_token_id=end,
        pad_token_id=pads[pad], **SIZES,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    # A special token that a response spells out is removed.
    completions = [*COMPLETIONS[:-1], COMPLETIONS[-1] + tokenizer.eos_token]
    label, index = (None, 0) if labels == 1 else ("label_1", 1)
    reward = Classifier(str(tmp_path), label, batch_size=3, separator=" ")
    alone = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        ids = torch.tensor([tokenizer(f"{prompt} {completion}")["input_ids"]])
        alone.append(model(input_ids=ids).logits[0, index].item())
    assert reward(PROMPTS, completions) == pytest.approx(alone, abs=1e-4)
    assert reward(PROMPTS[1:3], completions[1:3]) == pytest.approx(alone[1:3], abs=1e-4)


def test_chat_messages_are_refused():
    reward = Classifier(str(toy.REWARD_MODEL), "positive")
    with pytest.raises(UserError, match=r"^Classifier: expected text prompts"):
        reward([[{"role": "user", "content": "a film"}]], ["good"])


def test_texts_with_different_numbers_of_end_tokens_can_be_scored_together(tmp_path):
    """BART's head requires equally many end tokens in all texts of a batch, so texts are scored one at a time."""
    tokenizer = AutoTokenizer.from_pretrained("imdb_train/weights/policy")
    end = f" good{tokenizer.eos_token}"
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32}
    sizes |= {"decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(
        vocab_size=len(tokenizer), num_labels=1, max_position_embeddings=64, pad_token_id=1,
        eos_token_id=tokenizer.eos_token_id, decoder_start_token_id=0, **sizes,
    )  # fmt: skip
    transformers.BartForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    reward = Classifier(str(tmp_path))
    # The end tokens are in the prompts, since special tokens are removed from responses.
    alone = [reward([text], [""])[0] for text in (end, end + end)]
    assert reward([end, end + end], ["", ""]) == pytest.approx(alone)


def test_imdb_accepts_a_classifier_with_a_single_output(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained("imdb_train/weights/policy")
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), num_labels=1, eos_token_id=0, bos_token_id=0, **SIZES
    )
    transformers.GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = ImdbConfig(device="cpu")
    config.model.name = config.task.dataset = "tiny"
    config.task.reward_model = str(tmp_path)
    config.task.reward_label = None
    task = make_task(config)
    rewards = task.reward(PROMPTS, COMPLETIONS)
    assert rewards == pytest.approx(Classifier(str(tmp_path))(PROMPTS, COMPLETIONS))


def test_an_encoder_scores_texts_in_batches():
    reward = Classifier(str(toy.REWARD_MODEL), "POSITIVE")
    sizes = []
    reward.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    reward(PROMPTS, COMPLETIONS)
    assert sizes == [4]
