"""PPO on GSM8K (paper, section 4, E2), the baseline: one agent learns to solve word problems, scored by a rule.

    python gsm8k_train/ppo.py                                        # the toy setting: minutes on any machine
    python gsm8k_train/ppo.py --config configs/gsm8k/llama2_7b.yaml  # the paper's Table 2
    python gsm8k_train/ppo.py --config FILE --ppo.init_kl_coef 0.1   # any key as a flag; --help lists them

Trainer, data, reward and settings are the same as in `gsm8k_train/cory.py`, which makes two agents instead of one.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this script's folder first on the path, where `import cory` would find the script itself.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from cory.command import main, read_config
from gsm8k_train.config import GSM8K, Gsm8kConfig


def run() -> None:
    config, name = read_config(
        Gsm8kConfig, default="configs/gsm8k/tiny.yaml", prefix="gsm8k_ppo", single_agent=True
    )

    # Word problems, the rule that scores answers, and both prompts; held-out problems for `eval_every`.
    task = GSM8K.make_task(config)
    held_out = GSM8K.held_out_rows(config) if config.eval_every else None

    # Imported late: torch takes seconds, and errors above should appear at once.
    from cory import CoryTrainer, make_agents

    agents = make_agents(config)  # one LLM and its frozen reference
    CoryTrainer(config, agents, task, name, held_out).train()


if __name__ == "__main__":
    main(run)
