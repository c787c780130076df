"""Folders of runs and evaluations written by hand, with texts of one's own."""

import json
from dataclasses import asdict
from pathlib import Path

import yaml
from conftest import ROOT

from cory.command import load
from imdb_train.config import ImdbConfig

SETTINGS = asdict(load(ImdbConfig, ROOT / "configs/imdb/tiny.yaml", []))


def write_lines(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sample(agent, role, query, text, reward=0.5):
    """A record of samples.jsonl."""
    return {
        "agent": agent,
        "role": role,
        "query": query,
        "columns": {},
        "prompt": query if role == "pioneer" else f'Better than "{query}": {query}',
        "completion": text,
        "task_reward": reward,
        "kl": 1.25,
    }


def write_run(
    folder: Path,
    seed=0,
    agents=2,
    iterations=20,
    texts=(),
    flags=None,
    ended=True,
    **changes,
):
    """A run whose task reward rises by 0.1 an iteration, with one chain per text, an iteration each.

    `flags`: by iteration, those of agent_1. `changes`: of the metrics.
    """
    folder.mkdir(parents=True)
    settings = json.loads(json.dumps(SETTINGS)) | {"seed": seed, "iterations": iterations}
    settings["cory"]["num_agents"] = agents
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    roles = ("pioneer", "observer")[:agents]
    rows, samples = [], []
    for k in range(iterations):
        for a, role in enumerate(roles if k // 5 % 2 == 0 else reversed(roles)):
            row = {
                "iteration": k,
                "agent": f"agent_{a + 1}",
                "role": role,
                "task_reward": seed + a + 0.1 * k,
            }
            row |= {
                "kl": 0.05 * k,
                "combined_reward": 0.1 * k,
                "distinct_2": 0.5,
                "response_tokens": 9.0,
                **changes,
            }
            rows.append(row | {"flags": (flags or {}).get(k, []) if a == 0 else []})
    for k, text in enumerate(texts):
        for a, role in enumerate(roles):
            one = sample(f"agent_{a + 1}", role, f"query {k}", text, reward=k / 10)
            samples.append({"iteration": k, **one})
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(folder / "samples.jsonl", samples)
    if ended:
        solo = {
            f"agent_{a + 1}": [sample(f"agent_{a + 1}", "pioneer", "the film", "was")]
            for a in range(agents)
        }
        chain = [sample(f"agent_{a + 1}", role, "the film", "was") for a, role in enumerate(roles)]
        before = solo if agents == 1 else solo | {"chain": chain}
        (folder / "summary.json").write_text(
            json.dumps({"samples": {"before": before, "after": before}})
        )
    return folder


def write_evaluation(
    folder: Path, models=("base", "run/agent_1", "run/agent_2"), texts=("good", "bad")
):
    """An evaluation of the models alone, and of the last one after the one before it."""
    folder.mkdir(parents=True)
    queries, records = [f"query {i}" for i in range(len(texts))], []
    names = [(name, None) for name in models] + [(f"{models[-1]} after {models[-2]}", models[-2])]
    for name, read in names:
        for i, text in enumerate(texts):
            record = {
                "model": name,
                "query": i,
                "rewards": [i - 0.5, 9],
                "kl": [0.5, 9],
                "tokens": [2, 2],
            }
            record |= {"completions": [f"{text} by {name}", "second"]}
            record |= {
                "role": "observer" if read else "pioneer",
                "read": read,
                "prompt": f"after: {text}" if read else queries[i],
            }
            records.append(record)
    write_lines(folder / "responses.jsonl", records)
    numbers = {"task_reward": 0.5, "task_reward_ci": 0.1, "kl": 0.2, "kl_ci": 0.0}
    rows = [{"name": name, "calls": 2 if read else 1, **numbers} for name, read in names]
    titles = {"task_reward": "task reward", "kl": "KL"}
    settings = {
        "settings": {"shown": 1, "ks": []},
        "said": "2 queries",
        "titles": titles,
        "costs": {"calls": "calls"},
        "columns": [{} for _ in texts],
    }
    (folder / "evaluation.json").write_text(
        json.dumps({**settings, "queries": queries, "rows": rows})
    )
    return folder
