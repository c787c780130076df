"""The figures of docs/paper_figure.md, from the results in the repository."""

import pandas as pd
import pytest
from PIL import Image

from cory.streams import response_limit
from study import paper_figure
from study.frame import read_study


@pytest.mark.usefixtures("drawn_figures")
def test_the_figures_are_drawn_from_the_results(tmp_path):
    for draw in (paper_figure.token_reward, paper_figure.settings, paper_figure.lengths):
        path = tmp_path / f"{draw.__name__}.png"
        draw(path)
        with Image.open(path) as image:
            assert image.size == (1170, 468)
            assert len(image.getcolors(1 << 20)) > 100  # lines, bands and text, not a white page


def test_the_limits_that_are_drawn_again_are_those_of_the_runs():
    """No iteration's responses are longer than its limit; those of a policy near the base come close to it."""
    study = read_study(paper_figure.ROOT / "results" / "imdb_cures")
    metrics = study.metrics
    limits = pd.Series(
        [
            response_limit(int(seed), int(k), 4, 16)
            for seed, k in zip(metrics.seed, metrics.iteration, strict=True)
        ],
        index=metrics.index,
    )
    assert (metrics.response_tokens <= limits).all()
    first = metrics.iteration == 0
    assert (metrics.response_tokens[first] > 0.75 * limits[first]).all()


def test_each_run_has_each_bin_of_limits_once():
    by_limit = paper_figure.rewards_by_limit(
        read_study(paper_figure.ROOT / "results" / "imdb_cures")
    )
    for name in paper_figure.LENGTHS:
        seeds = by_limit.loc[name].groupby("limit").size()
        assert len(seeds) == len(paper_figure.LIMITS) and seeds.nunique() == 1
        tokens = by_limit.loc[name, "response_tokens"].groupby("limit").mean()
        assert all(
            mean <= last for mean, (_, last) in zip(tokens, paper_figure.LIMITS, strict=True)
        )
