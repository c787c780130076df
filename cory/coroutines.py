"""Waits for coroutines from synchronous code, also in a notebook."""

import asyncio
import functools
import inspect
import threading
from collections.abc import Sequence
from typing import Any


def wait(values: Sequence[Any]) -> list[Any]:
    """The values, each coroutine replaced by what it returns or the exception that it raises. All run concurrently."""

    async def finished(value: Any) -> Any:
        try:
            return await value if inspect.isawaitable(value) else value
        except (SystemExit, KeyboardInterrupt) as error:  # these would end the loop of all calls
            return error

    async def together() -> list[Any]:
        return await asyncio.gather(*map(finished, values), return_exceptions=True)

    if not any(map(inspect.isawaitable, values)):
        return list(values)
    results = asyncio.run_coroutine_threadsafe(together(), _loop()).result()
    for result in results:
        if isinstance(result, SystemExit | KeyboardInterrupt):
            raise result
    return results


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One event loop for all calls, as HTTP clients stay bound to theirs; in a thread, as a notebook runs its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop
