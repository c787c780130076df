"""CORY on GSM8K (paper, section 4, E2): pioneer and observer learn to solve word problems, scored by a rule.

    python gsm8k_train/cory.py                                               # the toy setting: minutes on any machine
    python gsm8k_train/cory.py --config configs/gsm8k/llama2_7b_lr1e-4.yaml  # the paper's Table 2
    python gsm8k_train/cory.py --config FILE --ppo.init_kl_coef 0.1          # any key as a flag; --help lists them

The defaults are the paper's. The toy setting, tiny.yaml, has other sizes and the sampled KL penalty. docs/paper.md
lists differences from the authors' published code.
`gsm8k_train/ppo.py` is the baseline; only the number of agents differs.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this script's folder first on the path, where `import cory` would find the script itself.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from cory.command import main, read_config
from gsm8k_train.config import GSM8K, Gsm8kConfig


def run() -> None:
    config, name = read_config(Gsm8kConfig, default="configs/gsm8k/tiny.yaml", prefix="gsm8k_cory")

    # Word problems, the rule that scores answers, and both prompts; held-out problems for `eval_every`.
    task = GSM8K.make_task(config)
    held_out = GSM8K.held_out_rows(config) if config.eval_every else None

    # Imported late: torch takes seconds, and errors above should appear at once.
    from cory import CoryTrainer, make_agents

    # Two copies of one LLM, unless config.agents says otherwise, and a frozen reference.
    agents = make_agents(config)
    CoryTrainer(config, agents, task, name, held_out).train()


if __name__ == "__main__":
    main(run)
