"""Name the plugin in an exception that it raises while a rank trains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from steadytrain.components.shared.errors import SteadytrainError, Stopped
from steadytrain.components.train.failures import FailureClass, class_of_error

_OUT_OF_MEMORY: Final = (FailureClass.GPU_OOM, FailureClass.HOST_OOM)
_ANOTHER_RANK: Final = (
    FailureClass.NODE_LOST,
    FailureClass.COLLECTIVE_TIMEOUT,
    FailureClass.NETWORK,
)


class PluginFailed(SteadytrainError):
    """A plugin raised an exception. The traceback shows where."""

    def __init__(self, plugin: str, hook: str, error: BaseException) -> None:
        super().__init__(f"{plugin} failed in {hook}(): {type(error).__name__}: {error}")


@contextlib.contextmanager
def naming(plugin: str, hook: str) -> Iterator[None]:
    """Name the plugin in an exception that it raises, sys.exit included.

    Running out of memory keeps its class, because the run can continue with smaller micro-batches.
    So does what torch raises in a collective if another rank is gone.

    Args:
        plugin: what failed, such as "training component 'ema'".
        hook: the function that is called in the block.

    Raises:
        PluginFailed: the block raised an exception that is not steadytrain's own.
    """
    try:
        yield
    except (SteadytrainError, Stopped):
        raise
    except (Exception, SystemExit) as error:
        kind = class_of_error(error)
        # torch raises a RuntimeError in a collective; a plugin's own connections do not.
        if kind in _OUT_OF_MEMORY or (kind in _ANOTHER_RANK and isinstance(error, RuntimeError)):
            raise
        raise PluginFailed(plugin, hook, error) from error
