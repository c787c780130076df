"""A group of runs has one colour in all figures of a page. PPO and CORY have the same colours on every page."""

import pytest
from handmade import compared, make_study
from written import write_run

from cory.run import plots as run_plots
from study import plots
from study.compare import write_page

PPO, CORY = "#c1440e", "#1f6fb4"


@pytest.fixture
def drawn(monkeypatch):
    """Collects drawn figures instead of saving them."""
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    return figures


def colours_of_lines(figure, groups):
    """Returns, for each group, the colours of the lines whose labels begin with its name."""
    lines = [line for axis in figure.axes for line in axis.get_lines()]
    return {
        group: {line.get_color() for line in lines if line.get_label().startswith(group)}
        for group in groups
    }


def test_a_group_has_the_same_colour_in_curves_and_paths_whatever_its_name(tmp_path, drawn):
    agents = {"a_pair": 2, "b_single": 1, "c_pair": 2, "d_single": 1}
    for group, count in agents.items():
        for seed in range(2):
            write_run(tmp_path / f"{group}-seed{seed}", seed, agents=count)
    study = compared(tmp_path)
    plots.plot_curves(study, tmp_path / "curves.png")
    plots.plot_paths(study, tmp_path / "paths.png", "pioneer")
    in_curves, in_paths = (colours_of_lines(figure, agents) for figure in drawn)
    assert in_curves == in_paths
    assert in_curves["a_pair"] == {CORY} and in_curves["b_single"] == {PPO}
    assert len(set.union(*in_curves.values())) == 4


def test_the_curves_of_a_page_leave_out_frozen_agents(tmp_path, drawn):
    """The frozen pioneer's KL is not measured: it is recorded as 0."""
    values = {"pioneer": (0.5, 0.0, 1.0), "observer": (2.0, 1.0, 1.0)}
    study = make_study(
        {"PPO": lambda *_: (1.0, 1.0, 1.0), "reader": lambda seed, k, role: values[role]},
        roles=("pioneer", "observer"),
        iterations=3,
    )
    write_page(study, tmp_path, "Frozen")
    (reader,) = [line for line in drawn[0].axes[1].get_lines() if "reader" in line.get_label()]
    assert set(reader.get_ydata()) == {1.0} and reader.get_color() not in (PPO, CORY)


def test_many_groups_never_repeat_the_colours_of_ppo_and_cory():
    assert {PPO, CORY}.isdisjoint(run_plots.colours(30)[2:])


@pytest.mark.parametrize("pairs", [3, 5])
def test_a_legend_fits_the_figure_and_covers_no_panel(tmp_path, drawn, pairs):
    """The legend is below the panels, or beside the rows of small multiples."""
    for number in range(pairs):
        write_run(
            tmp_path / f"pair-credit=causal-learning_rate={number}e-05-{'name' * 9}-seed0", agents=2
        )
    plots.plot_curves(compared(tmp_path), tmp_path / "curves.png")
    (figure,) = drawn
    figure.canvas.draw()
    legends = [*figure.legends, *(axis.get_legend() for axis in figure.axes if axis.get_legend())]
    texts = [text for legend in legends for text in legend.get_texts()]
    assert len(texts) >= 2 * pairs
    for text in texts:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
        assert not any(box.overlaps(axis.get_window_extent()) for axis in figure.axes)
