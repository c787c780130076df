"""Callbacks that settings name: `callbacks: FILE.py:NAME`."""

from cory.callbacks.callback import Callback
from cory.errors import UserError, described
from cory.tasks.config import as_list
from cory.tasks.python_files import PythonFiles


def load_callbacks(names: list[str] | str) -> list[Callback]:
    """An object of each class that FILE.py:NAME stands for.

    Raises a UserError: a file is missing or fails, or it defines no such class, or one that is no
    callback.
    """
    callbacks = []
    for loaded in PythonFiles().load("callbacks", as_list(names)):
        if not (isinstance(loaded.value, type) and issubclass(loaded.value, Callback)):
            raise UserError(
                f"callbacks: expected a class derived from cory.Callback, got {loaded.full_name} = {loaded.value!r}"
            )
        try:
            callbacks.append(loaded.value())
        except Exception as error:
            raise UserError(
                f"callbacks: expected {loaded.full_name} to be made without arguments, got {described(error)}"
            ) from None
    return callbacks
