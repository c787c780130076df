"""Callbacks that settings name: `callbacks: FILE.py:NAME`."""

from cory.callbacks.callback import Callback
from cory.code_files import as_list, load
from cory.errors import UserError


def load_callbacks(names: list[str] | str) -> list[Callback]:
    """An object of each class that FILE.py:NAME stands for.

    Raises a UserError: a file is missing or fails, or it defines no such class, or one that is no
    callback.
    """
    callbacks = []
    for name in as_list(names):
        kind = load("callbacks", name).value
        if not (isinstance(kind, type) and issubclass(kind, Callback)):
            raise UserError(
                f"callbacks: expected a class derived from cory.Callback, got {name} = {kind!r}"
            )
        callbacks.append(kind())
    return callbacks
