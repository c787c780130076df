"""Compares groups that differ in credit assignment: iterations to a reward, and the first role's gradient norm."""

from study.cells import Rows
from study.frame import RUN, Study
from study.intervals import difference, direction, holm, ratio

LEVELS = [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]  # levels of the last role's task reward
SHARE = 0.9  # a level counts if this share of all runs reaches it
SMOOTHED = 10  # iterations in a running mean, and in the mean of the squared gradient norms


def confirmed(study: Study, ours: str, rival: str) -> Rows:
    """Returns two comparisons of the rival with our group, paired by seed.

    One compares the number of iterations until the last role's task reward reaches the highest level that counts.
    The other compares the first role's squared gradient norm at the start of training. Both are primary; a ✓ marks
    those that survive Holm's correction.
    """
    first_role = study.first_role
    is_first = study.metrics["role"] == first_role
    rewards = study.metrics[~is_first].pivot(index="iteration", columns=RUN, values="task_reward")
    smooth = rewards.rolling(SMOOTHED).mean()
    reached = [level for level in LEVELS if (smooth.max() >= level).mean() >= SHARE]
    early = study.metrics[is_first & (study.metrics["iteration"] < SMOOTHED)]
    squares = early.assign(square=early["gradient_norm"] ** 2).groupby(RUN)["square"].mean()

    measured = []
    if reached:
        above = smooth >= reached[-1]
        # A run that never reaches the level counts as if it did so in its last iteration.
        first = above.idxmax().where(above.any(), smooth.index[-1]) + 1
        compared = difference(first[rival], first[ours])
        measured.append(
            (f"iterations to {reached[-1]:g}", first, compared, compared.text("+.1f"), 0.0, 1)
        )
    compared = ratio(squares[rival], squares[ours])
    measured.append(("squared gradient norm", squares, compared, compared.text(".2f"), 1.0, 2))

    rejected = holm([compared.p for _, _, compared, _, _, _ in measured])
    return [
        {
            "measure": measure,
            "n": str(compared.n),
            ours: f"{values[ours].mean():.{digits}f}",
            rival: f"{values[rival].mean():.{digits}f}",
            "difference or ratio": f"{text} {direction(compared, equal)}{' ✓' if survives else ''}",
        }
        for (measure, values, compared, text, equal, digits), survives in zip(
            measured, rejected, strict=True
        )
    ]
