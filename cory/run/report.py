"""What a run shows at its end: tables for the terminal, and the card of a saved agent."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import yaml

from cory.config import Config

CURVES = ("task_reward", "kl", "combined_reward")  # the metrics that every table and figure of a run has


def table(summary: dict[str, dict[str, dict[str, float]]]) -> str:
    """The summary as text: a row per agent and metric."""
    lines = ["", f"{'agent':10}{'metric':18}{'start':>9}{'end':>9}{'change':>9}"]
    for agent, metrics in summary.items():
        for metric, values in metrics.items():
            numbers = "".join(f"{values[key]:9.3f}" for key in ("start", "end", "change"))
            lines.append(f"{agent:10}{metric:18}{numbers}")
    return "\n".join(lines)


def sample_table(before: dict[str, list[dict[str, Any]]], after: dict[str, list[dict[str, Any]]]) -> str:
    """The same queries before and after training, each agent solo."""
    lines = []
    for row, sample in enumerate(next(iter(before.values()))):
        lines.append(f"\n{one_line(sample['query'])}")
        answers = [("before", sample)] + [(agent, rows[row]) for agent, rows in after.items()]
        lines += [f"  {who:10}{s['task_reward']:+7.2f}  {one_line(s['completion'])}" for who, s in answers]
    return "\n".join(lines)


def text_table(rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> str:
    """A line per model, each metric with the half-width of its interval."""
    name = max(len(row["name"]) for row in rows)
    cells = [[f"{row[m]:.3f} +- {row[f'{m}_ci']:.3f}" for m in titles] for row in rows]
    widths = [max(len(title), *(len(line[i]) for line in cells)) for i, title in enumerate(titles.values())]
    lines = [" " * name + "".join(f"  {title:>{w}}" for title, w in zip(titles.values(), widths, strict=True))]
    for row, line in zip(rows, cells, strict=True):
        lines.append(f"{row['name']:{name}}" + "".join(f"  {c:>{w}}" for c, w in zip(line, widths, strict=True)))
    return "\n".join(lines)


def one_line(text: str) -> str:
    """A model's text for a terminal or a table: control characters, line breaks among them, shown as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable(text: str) -> str:
    """A model's text with its line breaks; all other control characters are shown as escapes."""
    return "\n".join(map(one_line, text.split("\n")))


def model_card(agent: str, config: Config, summary: dict[str, dict[str, float]]) -> str:
    """The README.md of a saved agent."""
    method = config.method()
    config = config.of_agent(int(agent.removeprefix("agent_")) - 1)
    rows = "\n".join(f"| {metric} | {v['start']:.3f} | {v['end']:.3f} |" for metric, v in summary.items())
    settings = yaml.safe_dump(asdict(config), sort_keys=False)
    adapter = config.lora.rank > 0 and not config.lora.merge
    library, auto_class = "transformers", "AutoModelForCausalLM"
    tags = ["cory", config.algorithm, "reinforcement-learning"]
    imports = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    if adapter:
        library, auto_class, tags = "peft", "AutoPeftModelForCausalLM", [*tags, "lora"]
        imports = "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer"
    header = {"library_name": library, "base_model": config.model.name, "tags": tags}
    return f"""---
{yaml.safe_dump(header, sort_keys=False)}---
# {agent}

`{config.model.name}` fine-tuned with {method} for {config.iterations} iterations.

```python
{imports}
model = {auto_class}.from_pretrained("path/to/{agent}")
tokenizer = AutoTokenizer.from_pretrained("path/to/{agent}")
```

Means over the first and the last iterations of training, over the roles it held:

| metric | start | end |
|---|---|---|
{rows}

Settings:

```yaml
{settings}```

Method: Ma et al., "Coevolving with the Other You: Fine-Tuning LLM with Sequential Cooperative Multi-Agent
Reinforcement Learning", NeurIPS 2024, arXiv 2410.06101.
"""
