"""Plants faults in the package, one at a time, and reports which test finds each.

    python benchmarks/mutations.py --list                    # the faults, and the tests nearest to each
    python benchmarks/mutations.py --only gae_without_gamma  # one of them
    python benchmarks/mutations.py --out mutations.jsonl     # only faults that have no result in this file yet
    python benchmarks/mutations.py --folder-only             # without the whole suite

The faults are mistakes that a person could make: an off-by-one, a swapped argument, a wrong axis,
a dropped mask. Each is planted in a clone of the last commit. The tests nearest to the fault run
first. If they pass, the whole suite runs, without the slow tests, as in `make test`. The test that
finds a fault must pass without the fault. The exit status is 1 if a fault survives.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SURVIVED = "survived"
TIME_LIMIT = 3600  # seconds per test run; a fault may cause an endless loop


class Fault(NamedTuple):
    """A fault, planted by replacing a text in a file.

    Args:
        name: the fault's name.
        file: the file's path in the repository.
        before: the text to replace, which occurs once in the file.
        after: the new text.
        tests: the test files nearest to the fault, then the nearest folders.
    """

    name: str
    file: str
    before: str
    after: str
    tests: str


METHOD = (
    "tests/test_method.py tests/test_credit.py tests/test_roles.py tests/test_branches.py "
    "tests/test_trainer.py"
)
PPO = "tests/learners/test_ppo.py tests/learners"
GROUP = "tests/learners/test_group.py tests/learners"
SAMPLE = "tests/models/test_sample.py tests/models"
WINDOW = "tests/models/test_prefixes.py tests/models"
PARALLEL = "tests/parallel/test_distributed.py tests/parallel"
RESUME = "tests/run/test_resume.py tests/run"
EVALUATION = "tests/evaluation/test_costs.py tests/evaluation"
INTERVALS = "tests/study/test_intervals.py tests/study"

FAULTS = [
    # The method: exchange of roles, knowledge transfer (Eq. 3), credit (Eq. 4), random numbers.
    Fault(
        "exchange_early", "cory/chain.py",
        "turn = k // self.period", "turn = (k + 1) // self.period", METHOD,
    ),
    Fault(
        "first_response_read", "cory/roles.py",
        '[*responses.values()][-1]', '[*responses.values()][0]',
        f"tests/test_roles.py {METHOD}",
    ),
    Fault(
        "own_reward_weighted", "cory/credit.py",
        "return role_rewards + weighted([*earlier, *later])  # Eq. 4", "return weighted(task_rewards)",
        METHOD,
    ),
    Fault(
        "baseline_of_another_role", "cory/credit.py",
        "zip(later, baselines[role:], strict=True)", "zip(later, baselines)", METHOD,
    ),
    Fault(
        "branches_transposed", "cory/credit.py",
        "values.view(len(like), -1).mean(1)", "values.view(-1, len(like)).mean(0)",
        f"tests/test_credit.py tests/test_team_reward.py {METHOD}",
    ),
    Fault(
        "credit_unused", "cory/trainer.py",
        "self.update(k, chain.agents, rollouts, rewards)", "self.update(k, chain.agents, rollouts, task_rewards)",
        f"tests/test_trainer.py {METHOD}",
    ),
    Fault(
        "roles_draw_alike", "cory/chain.py",
        "purpose, k, role=role, process=rank)", "purpose, k, process=rank)",
        f"tests/test_streams.py {METHOD}",
    ),
    # The learners: token rewards (Eq. 2), values (Eq. 10), losses (Eq. 11, 13), GAE (Eq. 12).
    Fault(
        "reward_at_padding", "cory/learners/losses.py",
        "last_token = mask.sum(1, keepdim=True) - 1",
        "last_token = torch.full_like(mask[:, :1], mask.shape[1] - 1)",
        PPO,
    ),
    Fault(
        "clip_optimistic", "cory/learners/losses.py",
        "torch.max(unclipped, clipped)", "torch.min(unclipped, clipped)", PPO,
    ),
    Fault(
        "gae_without_gamma", "cory/learners/losses.py",
        "delta + gamma * lam * advantage", "delta + lam * advantage", PPO,
    ),
    Fault(
        "value_clip_optimistic", "cory/learners/losses.py",
        "torch.max(error, clipped_error)", "torch.min(error, clipped_error)", PPO,
    ),
    Fault(
        "values_detached", "cory/learners/ppo.py",
        "self.v_head(hidden)", "self.v_head(hidden.detach())", PPO,
    ),
    Fault(
        "rloo_with_itself", "cory/learners/algorithms.py",
        " * group_size / (group_size - 1)\n", "\n", GROUP,
    ),
    Fault(
        "deviation_across_groups", "cory/learners/algorithms.py",
        "rewards.std(1, keepdim=True)", "rewards.std(0, keepdim=True)", GROUP,
    ),
    Fault(
        "k3_sign", "cory/learners/algorithms.py",
        "(tokens.ref_logprobs - tokens.logprobs)", "(tokens.logprobs - tokens.ref_logprobs)", GROUP,
    ),
    Fault(
        "micro_batch_mean", "cory/learners/learner.py",
        "rows, sizes)", "rows, sizes._replace(responses=len(micro_indices)))", GROUP,
    ),
    # The models: sampling, padding, the response window, end tokens, the reference of an adapter.
    Fault(
        "temperature_inverted", "cory/models/sample.py",
        "TemperatureLogitsWarper(settings.temperature)",
        "TemperatureLogitsWarper(1 / settings.temperature)", SAMPLE,
    ),
    Fault(
        "positions_count_padding", "cory/models/window.py",
        "position_ids = (attention_mask.cumsum(1) - 1)",
        "position_ids = (torch.ones_like(attention_mask).cumsum(1) - 1)",
        f"{WINDOW} tests/learners",
    ),
    Fault(
        "new_tokens_masked", "cory/models/sample.py",
        "torch.cat([mask, mask[:, -1:]], 1)", "torch.cat([mask, mask[:, :1]], 1)", SAMPLE,
    ),
    Fault(
        "shared_window_late", "cory/models/prefixes.py",
        "torch.arange(prompt_length - 1, prompt_length - 1 + response_width)",
        "torch.arange(prompt_length, prompt_length + response_width)",
        f"{WINDOW} tests/learners",
    ),
    Fault(
        "one_end_token", "cory/models/sample.py",
        "if response[-1] in ends:", "if response[-1] in ends[:1]:", SAMPLE,
    ),
    Fault(
        "last_stop_text", "cory/models/text.py",
        "for end in stop), key=len,", "for end in stop), key=lambda text: -len(text),",
        "tests/tasks/test_gsm8k.py tests/models tests/tasks",
    ),
    Fault(
        "adapter_in_reference", "cory/learners/learner.py",
        "with self.policy.disable_adapter():", "with nullcontext():",
        "tests/models/test_lora.py tests/models tests/learners",
    ),
    # Several processes: the mean over all tokens, and the assignment of rows to ranks.
    Fault(
        "tokens_of_one_process", "cory/learners/learner.py",
        "distributed.all_reduce_sum(to_device(response_tokens, self.device))",
        "(to_device(response_tokens, self.device) * distributed.world_size())",
        PARALLEL,
    ),
    Fault(
        "rows_interleaved", "cory/parallel/distributed.py",
        "slice(rank() * share, (rank() + 1) * share)", "slice(rank(), rows, world_size())",
        PARALLEL,
    ),
    # A run: resuming, files, early stopping.
    Fault(
        "moments_not_resumed", "cory/learners/learner.py",
        'RewardMoments(**numbers["moments"])', "RewardMoments()",
        f"{RESUME} tests/learners",
    ),
    Fault(
        "lines_not_cut", "cory/run/checkpoint.py",
        "os.truncate(file, length or 0)", "pass",
        RESUME,
    ),
    Fault(
        "patience_with_ties", "cory/run/callbacks.py",
        " > largest:", " >= largest:",
        "tests/run/test_early_stopping.py tests/run",
    ),
    Fault(
        "gradient_unguarded", "cory/learners/learner.py",
        "math.isfinite(step.gradient_norm + step.sum_of_terms)", "math.isfinite(step.sum_of_terms)",
        f"{RESUME} tests/learners",
    ),
    # Evaluation: KL of all calls, chains, intervals, costs.
    Fault(
        "kl_of_the_last_call", "cory/evaluation/table.py",
        'chain_kl = _summed(chain, "kl")', 'chain_kl = _summed(chain[:1], "kl")', EVALUATION,
    ),
    Fault(
        "chains_read_nothing", "cory/evaluation/answer.py",
        "earlier or None,", "None,", "tests/evaluation/test_evaluation.py tests/evaluation",
    ),
    Fault(
        "intervals_without_clusters", "cory/evaluation/table.py",
        "mean_interval(numbers, clusters)", "mean_interval(numbers)", EVALUATION,
    ),
    Fault(
        "written_tokens_counted_as_read", "cory/evaluation/table.py",
        '"tokens_read": _summed(chain, "prompt_tokens")', '"tokens_read": _summed(chain, "tokens")',
        EVALUATION,
    ),
    # Rewards and answers.
    Fault(
        "rewards_in_order_of_length", "cory/rewards.py",
        "rewards[index] = logits", "rewards[start : start + self.batch_size] = logits",
        "tests/tasks/test_classifier.py tests/tasks",
    ),
    Fault(
        "first_marker_wins", "gsm8k_train/answers.py",
        "in first or reversed(marks):", "in first or marks:",
        "tests/tasks/test_answers.py tests/tasks",
    ),
    # Intervals over seeds.
    Fault(
        "a_degree_of_freedom_more", "study/intervals.py",
        "stats.t.ppf((1 + LEVEL) / 2, n - 1)", "stats.t.ppf((1 + LEVEL) / 2, n)", INTERVALS,
    ),
    Fault(
        "paired_by_position", "study/intervals.py",
        "over_seeds(ours[seeds] - theirs[seeds])",
        "over_seeds(ours.to_numpy() - theirs.to_numpy())", INTERVALS,
    ),
    Fault(
        "holm_backwards", "study/intervals.py",
        "(1 - LEVEL) / (len(tested) - rank)", "(1 - LEVEL) / (rank + 1)", INTERVALS,
    ),
]  # fmt: skip


class Ended(NamedTuple):
    """The result of a test run: the first test that failed, or None, and its error."""

    failed: str | None
    error: str


def run_tests(clone: Path, paths: list[str], ignored: list[str] | None = None) -> Ended:
    """Runs tests of the clone, except ignored ones, until one fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [f"--basetemp={clone.parent / 'pytest'}", *paths]
    command += [f"--ignore={path}" for path in ignored or []]
    # With PYTHONPATH, subprocesses of tests import the clone even from other working directories. No bytecode
    # is cached, because Python detects a changed file only by its size and its modification time in seconds.
    environment = os.environ | {"PYTHONPATH": str(clone), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    log = clone.parent / "pytest.log"
    with log.open("w") as file:
        try:
            status = subprocess.run(
                command, cwd=clone, env=environment, stdout=file, stderr=file, timeout=TIME_LIMIT
            ).returncode
        except subprocess.TimeoutExpired:
            return Ended(" ".join(paths), f"no end within {TIME_LIMIT} s")
    text = log.read_text(errors="replace")
    first = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", text, re.MULTILINE)
    if first:
        return Ended(first[1], first[2] or "")
    if status:
        raise SystemExit(f"pytest {' '.join(paths)}: status {status}\n{text[-2000:]}")
    return Ended(None, "")


def find(clone: Path, fault: Fault, near: bool, suite: bool) -> Ended:
    """Plants a fault and runs the tests nearest to it, the whole suite, or both."""
    file = clone / fault.file
    text = file.read_text(encoding="utf-8")
    count = text.count(fault.before)
    if count != 1:
        raise SystemExit(
            f"{fault.name}: expected {fault.before!r} once in {fault.file}, got it {count} times"
        )
    paths = [path for path in dict.fromkeys(fault.tests.split()) if (clone / path).exists()]
    # Files and folders run in separate commands; in a single one, pytest would order them by folder.
    files = [path for path in paths if path.endswith(".py")]
    folders = [path for path in paths if path not in files]
    steps = [files, folders] if near else []
    if suite:
        steps.append(["tests"])
    ended = Ended(None, "")
    done = [] if near else paths
    file.write_text(text.replace(fault.before, fault.after), encoding="utf-8")
    try:
        for step in filter(None, steps):
            ended = run_tests(clone, step, ignored=done)
            if ended.failed is not None:
                break
            done = [*done, *step]
    finally:
        file.write_text(text, encoding="utf-8")
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="plant only these faults")
    parser.add_argument("--out", type=Path, help="file for the results; existing lines are kept")
    parser.add_argument("--list", action="store_true", help="print the faults and exit")
    parser.add_argument("--folder-only", action="store_true", help="leave out the whole suite")
    parser.add_argument(
        "--repository", type=Path, default=ROOT, help="repository whose last commit is tested"
    )
    options = parser.parse_args()

    by_name = {fault.name: fault for fault in FAULTS}
    unknown = [name for name in options.only or [] if name not in by_name]
    if unknown:
        parser.error(f"--only: expected names from --list, got {unknown}")
    faults = [by_name[name] for name in options.only or by_name]
    if options.list:
        for fault in faults:
            print(f"{fault.name}: {fault.file}: {fault.before!r} -> {fault.after!r}; {fault.tests}")
        return

    results = {}
    if options.out and options.out.exists():
        lines = map(json.loads, options.out.read_text(encoding="utf-8").splitlines())
        results = {line["fault"]: line for line in lines}

    passing: set[str] = set()  # tests that pass without a fault
    with tempfile.TemporaryDirectory() as temporary:
        clone = Path(temporary) / "clone"
        subprocess.run(["git", "clone", "--quiet", options.repository, clone], check=True)
        for fault in faults:
            line = results.get(fault.name)
            # A fault that survived its nearest tests still has to face the whole suite.
            suite_is_left = line is not None and line["found_by"] == SURVIVED and not line["suite"]
            if line is not None and (options.folder_only or not suite_is_left):
                continue
            started = time.monotonic()
            ended = find(clone, fault, near=not suite_is_left, suite=not options.folder_only)
            seconds = time.monotonic() - started
            if ended.failed is not None and ended.failed not in passing:
                if run_tests(clone, [ended.failed]).failed:
                    raise SystemExit(f"{ended.failed} fails without a fault, too: {ended.error}")
                passing.add(ended.failed)
            results[fault.name] = line = {
                "fault": fault.name,
                "found_by": ended.failed or SURVIVED,
                "error": ended.error,
                "suite": not options.folder_only,
                "seconds": round(seconds),
            }
            print(json.dumps(line), flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    survived = [fault.name for fault in faults if results[fault.name]["found_by"] == SURVIVED]
    if survived:
        raise SystemExit(f"{len(survived)} of {len(faults)} survived: {', '.join(survived)}")


if __name__ == "__main__":
    main()
