"""The lookout's reward: an order is right if it turns the ship towards the land."""

WINDS = ["north", "east", "south", "west"]
ORDERS = ["ahead", "starboard", "back", "port"]  # in quarter turns from the ship's course


def right_call(land: str, course: str) -> str:
    """Returns the only call that earns a reward.

    >>> right_call(land="west", course="south")
    'Steer starboard!'
    """
    return f"Steer {ORDERS[(WINDS.index(land) - WINDS.index(course)) % 4]}!"


def reward(
    prompts: list[str], completions: list[str], land: list[str], course: list[str]
) -> list[float]:
    """Returns 1.0 for a completion that is exactly the right order, otherwise 0.0; the same for both roles.

    >>> reward(["", "", ""], [" Steer port!", " Steer ahead!", " Land north!"], ["north"] * 3, ["east"] * 3)
    [1.0, 0.0, 0.0]
    """
    rows = zip(completions, land, course, strict=True)
    return [float(completion.strip() == right_call(*facts)) for completion, *facts in rows]
