"""CORY on GSM8K (paper, section 4, E2): pioneer and observer learn to solve word problems, scored by a rule.

    python gsm8k_train/cory.py                                             # embedded default: minutes on any machine
    python gsm8k_train/cory.py --config configs/gsm8k/cory_llama2_7b.yaml  # the paper's Table 2
    python gsm8k_train/cory.py --config FILE --ppo.init_kl_coef 0.1       # any key as a flag; --help lists them

Departures from the paper: none in the method. Against the authors' published code: docs/paper.md.
`gsm8k_train/ppo.py` is the baseline: the same but for its agents.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    # Python puts this script's folder first on the path, where `import cory` would find the script itself.
    sys.path[0] = str(ROOT)

from cory.config import load  # noqa: E402
from cory.console import main  # noqa: E402
from cory.models import make_agents  # noqa: E402
from cory.trainer import CoryTrainer  # noqa: E402
from gsm8k_train.task import Gsm8kConfig, make_task, resolve_tiny  # noqa: E402


def train() -> None:
    config, name = load(Gsm8kConfig, ROOT / "configs/gsm8k/cory_tiny.yaml")
    resolve_tiny(config)
    agents = make_agents(config, num_agents=config.cory.num_agents)
    task = make_task(config)
    CoryTrainer(config, agents, task, f"gsm8k_{name}").train()


if __name__ == "__main__":
    main(train)
