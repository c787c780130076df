"""That a run ended before its last iteration, in words. Importing this imports nothing heavy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cory.run.folder import BEST

REASONS = {
    "guards.patience": "the reward on held-out prompts had stopped rising (guards.patience)",
    "guards.stop_at_kl": "the KL to the reference was above its bound (guards.stop_at_kl)",
}


def ended_early(summary: Mapping[str, Any], planned: int) -> str:
    """When and by what a run ended early; empty if it did not.

    Args:
        summary: of summary.json. planned: iterations.
    """
    if not summary.get("stopped"):
        return ""
    by = summary.get("stopped_by", "a callback")
    return f"ended early, after iteration {summary['iterations']} of {planned}, by {by}"


def explained_end(folder: Path, summary: Mapping[str, Any], planned: int) -> list[str]:
    """For a report: why a run ended early, its best evaluation, and where the best agents are; else nothing."""
    if not summary.get("stopped"):
        return []
    reason = REASONS.get(summary.get("stopped_by", ""), "a callback has ended it")
    text = f"This run ended early, after iteration {summary['iterations']} of {planned}: {reason}."
    best = summary.get("best")
    if best:
        with_team = "eval_team_reward" in best
        name = "task and team reward" if with_team else "task reward"
        reward = best["eval_task_reward"] + best.get("eval_team_reward", 0.0)
        text += (
            f" The best held-out {name}, {reward:.3f}, is that after iteration "
            f"{best['iterations']}; the agents of then are in {folder.name}/{BEST}, those of the "
            f"end in {folder.name}."
        )
    return [text]
