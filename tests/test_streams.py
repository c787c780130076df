"""Random numbers derive from their purpose alone."""

from dataclasses import fields, replace

import numpy as np
import torch
from test_resume import count_good, make_trainer

from cory.streams import Purpose, Stream

KEY = Stream(seed=3, purpose=Purpose.SAMPLING, iteration=5, agent=1, role=1, process=1)


def test_equal_keys_give_equal_numbers_and_any_other_key_gives_others():
    others = [replace(KEY, **{field.name: 2}) for field in fields(KEY)]
    assert KEY.torch().initial_seed() == replace(KEY).torch().initial_seed()
    assert torch.equal(torch.rand(4, generator=KEY.torch()), torch.rand(4, generator=KEY.torch()))
    for draw in (lambda s: s.numpy().random(), lambda s: torch.rand(1, generator=s.torch()).item()):
        assert len({draw(stream) for stream in [KEY, *others]}) == 1 + len(others)


def test_the_global_generator_is_lent_and_given_back():
    before = torch.get_rng_state()
    with KEY.as_global():
        inside = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(inside, torch.rand(3, generator=KEY.torch()))


def test_a_run_does_not_read_the_global_generators(config, tmp_path):
    def drawing(prompts, completions):
        torch.rand(3)
        np.random.rand()
        return count_good(prompts, completions)

    drawing.__name__ = drawing.__qualname__ = "count_good"
    folders = []
    for seed, reward in ((1, count_good), (2, drawing)):
        torch.manual_seed(seed)
        folder = (
            make_trainer(replace(config, output=str(tmp_path / str(seed))), reward).train().folder
        )
        folders.append(folder)
    metrics, samples = (
        [(folder / name).read_bytes() for folder in folders]
        for name in ("metrics.jsonl", "samples.jsonl")
    )
    assert metrics[0] == metrics[1] and samples[0] == samples[1]
