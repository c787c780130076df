"""The figures of docs/paper_figure.md, from the results in the repository."""

from PIL import Image

from study import paper_figure


def test_the_figures_are_drawn_from_the_results(tmp_path):
    for draw in (paper_figure.token_reward, paper_figure.settings):
        path = tmp_path / f"{draw.__name__}.png"
        draw(path)
        with Image.open(path) as image:
            assert image.size == (1170, 468)
            assert len(image.getcolors(1 << 20)) > 100  # lines, bands and text, not a white page
