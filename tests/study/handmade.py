"""Studies of hand-made runs, read from folders or built as data frames."""

import pandas as pd

from study.compare import read_runs
from study.frame import HELD_OUT, LIMIT, SHORTEST, assemble, with_combined_reward


def compared(tmp_path):
    """Returns a study of the runs in a folder."""
    return read_runs(sorted(path for path in tmp_path.iterdir() if path.is_dir()))


def make_study(groups, roles=("pioneer",), seeds=5, iterations=40):
    """Returns a study of hand-made runs.

    Args:
        groups: For each group (runs that differ only in their seed), its name and a function that takes seed, iteration
            and role and returns task reward, KL and distinct-2.
    """
    runs, metrics = [], []
    for name, values in groups.items():
        for seed in range(seeds):
            run = {"group": name, "family": name, "seed": seed, "baseline": name == "PPO"}
            run |= {"eta": 0.3, "kl_bound": 50.0, "first_role": roles[0], "fixed_roles": False}
            run |= {"run": f"{name}-{seed}", "iterations": iterations, "planned": iterations}
            run |= {"seconds": 0, SHORTEST: "4", LIMIT: "14"}
            texts = ("over", "value", "evaluation", "version", "stopped_by")
            texts += ("fingerprint.reward", "fingerprint.reward_sha256")
            runs.append(run | dict.fromkeys(texts, ""))
            for k in range(iterations):
                for agent, role in enumerate(roles if name != "PPO" else roles[:1], 1):
                    row = {"group": name, "seed": seed, "iteration": k}
                    row |= {"agent": f"agent_{agent}", "role": role, "response_tokens": 9.0}
                    numbers = values(seed, k, role)
                    row |= zip(("task_reward", "kl", "distinct_2"), numbers, strict=True)
                    metrics.append(row)
    return assemble(pd.DataFrame(runs), pd.DataFrame(metrics))


def held(study, rows):
    """Adds hand-made held-out rows to a study."""
    columns = ["group", "seed", "answers", "calls", "task_reward", "kl", "chain_kl"]
    frame = pd.DataFrame(rows, columns=columns).assign(combined_reward=0.0)
    frame["agent"] = frame["answers"].str.partition(" after ")[0]
    study.held_out = frame.astype({"seed": "Int64"})
    assert set(HELD_OUT) < set(frame)
    return with_combined_reward(study)
