"""Random numbers depend only on their key: seed, purpose, iteration, agent, role and process."""

from dataclasses import fields, replace

import torch

from cory.streams import Purpose, Stream

KEY = Stream(seed=3, purpose=Purpose.SAMPLING, iteration=5, agent=1, role=1, process=1)


def test_equal_keys_give_equal_numbers_and_any_other_key_gives_others():
    others = [replace(KEY, **{field.name: 2}) for field in fields(KEY)]
    assert torch.equal(torch.rand(4, generator=KEY.torch()), torch.rand(4, generator=KEY.torch()))
    for draw in (lambda s: s.numpy().random(), lambda s: torch.rand(1, generator=s.torch()).item()):
        assert len({draw(stream) for stream in [KEY, *others]}) == 1 + len(others)


def test_as_global_seeds_the_global_generator_and_restores_it():
    before = torch.get_rng_state()
    with KEY.as_global():
        inside = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(inside, torch.rand(3, generator=KEY.torch()))
