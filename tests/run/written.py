"""Writes folders of runs and evaluations with given texts and numbers, without training."""

import json
from dataclasses import asdict
from pathlib import Path

import yaml
from conftest import ROOT

from cory.command import load
from imdb_train.config import ImdbConfig

SETTINGS = asdict(load(ImdbConfig, ROOT / "configs/imdb/tiny.yaml", []))
ROLES = ("pioneer", "observer")


def write_lines(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_settings(folder, settings):
    """Writes a run's config.yaml with the fast C library, since some tests write dozens."""
    (folder / "config.yaml").write_text(yaml.dump(settings, Dumper=yaml.CSafeDumper))


def sample(agent, role, query, text, reward=0.5):
    """Returns a record of samples.jsonl."""
    prompt = query if role == "pioneer" else f'Better than "{query}": {query}'
    record = {"agent": agent, "role": role, "query": query, "columns": {}, "prompt": prompt}
    return record | {"completion": text, "task_reward": reward, "kl": 1.25}


def write_run(
    folder: Path, seed=0, agents=1, iterations=12, planned=None, texts=(), flags=None,
    reward=0.0, kl=1.0, distinct=1.0, changes=None,
):  # fmt: skip
    """Writes a run whose task reward rises by 0.1 an iteration from `reward`; agent_2 earns 1 more.

    Args:
        planned: The planned number of iterations of an unfinished run.
        texts: By iteration, the completion that every agent gives in the samples.
        flags: By iteration, the `flags` in agent_1's metrics.
        distinct: Distinct-2 after the first iteration.
        changes: Changed settings by key.
    """
    folder.mkdir(parents=True)
    settings = json.loads(json.dumps(SETTINGS)) | {
        "seed": seed,
        "iterations": planned or iterations,
    }
    settings["cory"]["num_agents"] = agents
    for key, value in (changes or {}).items():
        block, name = key.split(".")
        settings[block][name] = value
    write_settings(
        folder, settings | {"versions": {"commit": "abc"}, "fingerprint": {"task": "imdb"}}
    )
    rows = []
    for k in range(iterations):
        for a in range(agents):
            earned = reward + 0.1 * k + a
            row = {"iteration": k, "agent": f"agent_{a + 1}", "role": ROLES[(a + k // 5) % agents]}
            row |= {"task_reward": earned, "kl": kl, "combined_reward": earned - 0.3 * kl}
            row |= {"distinct_2": distinct if k else 1.0, "response_tokens": 9.0}
            rows.append(row | {"flags": (flags or {}).get(k, []) if a == 0 else []})
    write_lines(folder / "metrics.jsonl", rows)
    chains = [
        {"iteration": k, **sample(f"agent_{a + 1}", ROLES[a], f"query {k}", text, k / 10)}
        for k, text in enumerate(texts)
        for a in range(agents)
    ]
    write_lines(folder / "samples.jsonl", chains)
    if planned is None:
        chain = [sample(f"agent_{a + 1}", ROLES[a], "the film", "was") for a in range(agents)]
        before = {
            step["agent"]: [sample(step["agent"], "pioneer", "the film", "was")] for step in chain
        }
        before |= {"chain": chain} if agents > 1 else {}
        summary = {"iterations": iterations, "samples": {"before": before, "after": before}}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def write_evaluation(folder: Path, texts=("good", "bad")):
    """Writes an evaluation of the base model, two agents alone, and the second agent after the first."""
    folder.mkdir(parents=True)
    models = ["base", "run/agent_1", "run/agent_2"]
    names = [(name, None) for name in models] + [("run/agent_2 after run/agent_1", "run/agent_1")]
    queries, records = [f"query {i}" for i in range(len(texts))], []
    for name, read in names:
        for i, text in enumerate(texts):
            record = {"model": name, "query": i, "rewards": [i - 0.5, 9], "kl": [0.5, 9]}
            record |= {"tokens": [2, 2], "completions": [f"{text} by {name}", "second"]}
            record |= {"role": "observer" if read else "pioneer", "read": read}
            records.append(record | {"prompt": f"after: {text}" if read else queries[i]})
    write_lines(folder / "responses.jsonl", records)
    numbers = {"task_reward": 0.5, "task_reward_ci": 0.1, "kl": 0.2, "kl_ci": 0.0}
    rows = [{"name": name, "calls": 2 if read else 1, **numbers} for name, read in names]
    content = {
        "settings": {"shown": 100, "ks": []},
        "description": "2 queries",
        "notes": ["a caveat"],
        "titles": {"task_reward": "task reward", "kl": "KL"},
        "costs": {"calls": "calls"},
        "queries": queries,
        "in_training": {"run": 0.0},
        "rows": rows,
        "columns": [{} for _ in texts],
    }
    (folder / "evaluation.json").write_text(json.dumps(content))
    return folder
