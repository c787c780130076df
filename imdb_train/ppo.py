"""PPO on IMDB (paper, section 4, E1), the baseline: one agent learns to continue film reviews positively.

    python imdb_train/ppo.py                                             # embedded default: minutes on any machine
    python imdb_train/ppo.py --config configs/imdb/ppo_gpt2_large.yaml  # the paper's Table 1
    python imdb_train/ppo.py --config FILE --ppo.init_kl_coef 0.1        # any key as a flag; --help lists them

The same trainer, data, reward and settings as `imdb_train/cory.py`, which makes two agents instead of one.
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
from imdb_train.task import ImdbConfig, make_task, resolve_tiny  # noqa: E402


def train() -> None:
    config, name = load(ImdbConfig, ROOT / "configs/imdb/ppo_tiny.yaml")
    resolve_tiny(config)
    agents = make_agents(config, num_agents=1)
    task = make_task(config, agents[0].ppo.current_device)
    CoryTrainer(config, agents, task, f"imdb_{name}").train()


if __name__ == "__main__":
    main(train)
