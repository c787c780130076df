"""PPO on GSM8K (paper, section 4, E2), the baseline: one agent learns to solve word problems, scored by a rule.

    python gsm8k_train/ppo.py                                             # embedded default: minutes on any machine
    python gsm8k_train/ppo.py --config configs/gsm8k/ppo_llama2_7b.yaml  # the paper's Table 2
    python gsm8k_train/ppo.py --config FILE --ppo.init_kl_coef 0.1       # any key as a flag; --help lists them

The same trainer, data, reward and settings as `gsm8k_train/cory.py`, which makes two agents instead of one.
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
    config, name = load(Gsm8kConfig, ROOT / "configs/gsm8k/ppo_tiny.yaml")
    resolve_tiny(config)
    agents = make_agents(config, num_agents=1)
    task = make_task(config)
    CoryTrainer(config, agents, task, f"gsm8k_{name}").train()


if __name__ == "__main__":
    main(train)
