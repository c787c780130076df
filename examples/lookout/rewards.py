"""The rule of the lookout's world: an order is right if it turns the ship towards the land."""

WINDS = ["north", "east", "south", "west"]
ORDERS = ["ahead", "starboard", "back", "port"]  # by quarter turns from the ship's course


def right_call(land: str, course: str) -> str:
    """The one call that earns a reward.

    >>> right_call(land="west", course="south")
    'Steer starboard!'
    """
    return f"Steer {ORDERS[(WINDS.index(land) - WINDS.index(course)) % 4]}!"


def reward(
    prompts: list[str], completions: list[str], land: list[str], course: list[str]
) -> list[float]:
    """1.0 where a completion is the right order and nothing else, else 0.0; the same for both roles.

    >>> reward(["", "", ""], [" Steer port!", " Steer ahead!", " Land north!"], ["north"] * 3, ["east"] * 3)
    [1.0, 0.0, 0.0]
    """
    rows = zip(completions, land, course, strict=True)
    return [float(completion.strip() == right_call(*where)) for completion, *where in rows]
