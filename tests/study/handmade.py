"""Runs' folders written by hand."""

import json
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import yaml
from conftest import ROOT

from cory.command import load
from imdb_train.config import ImdbConfig
from study.compare import read_runs
from study.frame import assemble

BASE = asdict(load(ImdbConfig, ROOT / "configs/imdb/tiny.yaml", [], single_agent=True))


def make_run(
    folder: Path,
    seed=0,
    agents=1,
    iterations=12,
    planned=None,
    reward=0.0,
    kl=1.0,
    distinct=1.0,
    fingerprint=None,
    **changes,
):
    """A run's folder: task reward rises by 0.1 an iteration from `reward`; agent_2 earns 1 more."""
    folder.mkdir(parents=True)
    settings = json.loads(json.dumps(BASE)) | {"seed": seed, "iterations": planned or iterations}
    settings["cory"]["num_agents"] = agents
    for key, value in changes.items():
        block, name = key.split("__")
        settings[block][name] = value
    recorded = {"versions": {"commit": "abc"}} | (
        {"fingerprint": fingerprint} if fingerprint else {}
    )
    write_settings(folder, {**settings, **recorded})
    rows = []
    for k in range(iterations):
        for a in range(agents):
            role = ("pioneer", "observer")[(a + k // 5) % 2] if agents > 1 else "pioneer"
            r = reward + 0.1 * k + a
            rows.append(
                {"iteration": k, "agent": f"agent_{a + 1}", "role": role, "task_reward": r, "kl": kl,
                 "combined_reward": r - 0.3 * kl, "distinct_2": 1.0 if k == 0 else distinct, "response_tokens": 9.0}
            )  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if planned is None:
        sample = {
            "role": "pioneer",
            "query": "the film",
            "prompt": "the film",
            "completion": "was `good`|",
            "task_reward": 0.5,
            "kl": 0.1,
        }
        names = [f"agent_{a + 1}" for a in range(agents)]
        texts = {name: [{"agent": name, **sample}] for name in names}
        (folder / "summary.json").write_text(
            json.dumps({"samples": {"before": texts, "after": texts}})
        )
    return folder


def write_settings(folder, settings):
    """A run's config.yaml, by the C library, as some tests write hundreds."""
    (folder / "config.yaml").write_text(yaml.dump(settings, Dumper=yaml.CSafeDumper))


def compared(tmp_path):
    """The study of the runs in a folder."""
    return read_runs(sorted(path for path in tmp_path.iterdir() if path.is_dir()))


def make_study(groups, roles=("pioneer",), seeds=5, iterations=40):
    """Runs by hand. `groups`: by name, a function of seed, iteration and role to task reward, KL and distinct-2."""
    runs, metrics = [], []
    for name, values in groups.items():
        for seed in range(seeds):
            facts = {
                "group": name,
                "family": name,
                "seed": seed,
                "baseline": name == "PPO",
                "eta": 0.3,
                "kl_bound": 50.0,
                "first_role": roles[0],
                "fixed_roles": False,
                "run": f"{name}-{seed}",
                "iterations": iterations,
                "planned": iterations,
                "seconds": 0,
                "megabytes": 0,
            }
            texts = ("over", "value", "evaluation", "version", "stopped_by")
            texts += ("fingerprint.reward", "fingerprint.reward_sha256")
            runs.append(facts | dict.fromkeys(texts, ""))
            for k in range(iterations):
                for agent, role in enumerate(roles if name != "PPO" else roles[:1], 1):
                    reward, kl, distinct = values(seed, k, role)
                    row = {
                        "group": name,
                        "seed": seed,
                        "iteration": k,
                        "agent": f"agent_{agent}",
                        "role": role,
                    }
                    metrics.append(
                        row
                        | {
                            "task_reward": reward,
                            "kl": kl,
                            "distinct_2": distinct,
                            "response_tokens": 9.0,
                        }
                    )
    return assemble(pd.DataFrame(runs), pd.DataFrame(metrics))
