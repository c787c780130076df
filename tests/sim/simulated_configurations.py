"""An iteration of every shipped configuration on the CPU and on the simulated accelerator:
`simulated_configurations.py FOLDER`.

Started by tests/test_configurations.py. The model has the configuration's architecture at small
width (small_configurations.py). Besides, only sizes differ, and data: the toy's. 4 bit weights are
left out, as no kernel of bitsandbytes runs here. Writes FOLDER/results.json: of each file and device
the records of its iterations, or its traceback.
"""

import json
import sys
import traceback
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

import simulated  # noqa: E402
import torch  # noqa: E402
from accelerate import PartialState  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from conftest import sentences  # noqa: E402
from datasets import Dataset  # noqa: E402
from small_configurations import FILES, MODELS, read, small  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from cory.agents import make_agents  # noqa: E402
from cory.callbacks.metrics import measure  # noqa: E402
from cory.config import Config  # noqa: E402
from cory.tasks.kind import TaskKind, find_kind  # noqa: E402
from cory.trainer import CoryTrainer  # noqa: E402
from study.small_models import save, train_tokenizer  # noqa: E402

# What Qwen's own template reads: turns, and whether to think.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}"
    "{% endif %}"
)


def make_models(folder: Path) -> dict[str, str]:
    """The folder of every model, at small width, with a tokenizer. Models that differ in
    their sizes alone share one.
    """
    tokenizer = train_tokenizer(sentences(200), vocab_size=320)
    tokenizer.chat_template = CHAT_TEMPLATE
    folders: dict[str, str] = {}  # by architecture
    for name in MODELS:
        architecture = small(name, len(tokenizer))
        key = architecture.to_json_string()
        if key not in folders:
            torch.manual_seed(0)
            folders[key] = str(folder / name)
            save(AutoModelForCausalLM.from_config(architecture), tokenizer, folder / name)
    return {name: folders[small(name, len(tokenizer)).to_json_string()] for name in MODELS}


def make_small(config: Config, models: dict[str, str], device: str) -> Config:
    """The settings at small size: a batch of 4 with its gradients in two parts if the file
    accumulates them, responses of 3 tokens, two epochs."""
    steps = 2 if config.ppo.gradient_accumulation_steps > 1 else 1
    config.iterations = 1
    config.device = device
    config.sample_every = 0
    config.model.name = models.get(config.model.name, config.model.name)
    config.model.quantization = "none"
    config.ppo = replace(
        config.ppo,
        batch_size=4,
        mini_batch_size=4 // steps,
        gradient_accumulation_steps=steps,
        ppo_epochs=min(2, config.ppo.ppo_epochs),
    )
    config.sampling.min_new_tokens = config.sampling.max_new_tokens = 3
    task = config.task  # type: ignore[attr-defined]
    task.dataset = "tiny"
    if hasattr(task, "reward_model"):
        task.reward_model, task.min_chars = "tiny", 0
    else:
        task.subset = None
    return config


rows: dict[str, Dataset] = {}  # by kind of task; a few, as all of them are encoded before a run


def run(kind: TaskKind, config: Config) -> dict[str, object]:
    """The records of an iteration, or the traceback."""
    PartialState._reset_state()
    AcceleratorState._reset_state(True)
    simulated.use(config.device)
    try:
        if kind.name not in rows:
            rows[kind.name] = kind.training_rows(config).select(range(16))
        task = kind.make_task(config, rows[kind.name])
        trainer = CoryTrainer(config, make_agents(config), task)
        records = [
            record
            for k in range(config.iterations)
            for record in measure(trainer, trainer.iteration(k))
        ]
    except Exception:
        return {"error": traceback.format_exc()}
    return {"records": records}


def main() -> None:
    folder = Path(sys.argv[1])
    models = make_models(folder / "models")
    simulated.install()
    simulated.place = lambda: ""  # nothing is counted here
    results: dict[str, dict[str, object]] = {}
    runs: dict[str, dict[str, object]] = {}  # by settings, as some files differ in sizes alone
    for file in FILES:
        kind = find_kind(file.parent.name)
        by_device = results[f"{kind.name}/{file.stem}"] = {}
        for device in ("cpu", "sim:0"):
            config = make_small(read(file), models, device)
            settings = repr(config)
            if settings not in runs:
                runs[settings] = run(kind, config)
            by_device[device] = runs[settings]
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
