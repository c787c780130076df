"""CORY on GSM8K (paper, section 4, E2): pioneer and observer learn to solve word problems, scored by a rule.

    python gsm8k_train/cory.py                                               # the toy setting: minutes on any machine
    python gsm8k_train/cory.py --config configs/gsm8k/llama2_7b_lr1e-4.yaml  # the paper's Table 2
    python gsm8k_train/cory.py --config FILE --ppo.init_kl_coef 0.1          # any key as a flag; --help all lists them

Departures from the paper: none in the method. Differences from the authors' published code: docs/paper.md.
`gsm8k_train/ppo.py` is the baseline, identical but for the number of agents.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    # Python puts this script's folder first on the path, where `import cory` would find the script itself.
    sys.path[0] = str(ROOT)

from cory.cli.settings import announce, load, main  # noqa: E402
from gsm8k_train.config import Gsm8kConfig  # noqa: E402


def train() -> None:
    config, name = load(Gsm8kConfig, ROOT / "configs/gsm8k/tiny.yaml", prefix="gsm8k_cory")
    announce(config, name)
    from cory import CoryTrainer, make_agents  # after the settings are checked: importing torch and TRL takes seconds
    from gsm8k_train.task import held_out, make_task

    agents = make_agents(config)
    task = make_task(config, agents[0].device)
    CoryTrainer(config, agents, task, name, held_out(config)).train()


if __name__ == "__main__":
    main(train)
