"""Run a study until it is complete, as `steadytrain tune` and `steadytrain ablate` do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from steadytrain.components.shared.errors import BadInput, Stopped

if TYPE_CHECKING:
    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.tune.driver import Watcher
    from steadytrain.components.tune.history import Params
    from steadytrain.components.tune.study import Study


def run_study(
    config: RunConfig,
    watcher: Watcher,
    tell: Callable[[str], object],
    *,
    write: Callable[[Study, Path], None],
    first: Callable[[], Sequence[Params]] = list,
) -> Study:
    """Run or continue a study. If it is stopped, say how to continue it.

    Args:
        tell, write, first: see `search`.

    Raises:
        Stopped: the process was asked to stop; the same command continues the study.
        SteadytrainError: see `driving` and `search`.
    """
    from steadytrain.components.tune.driver import driving
    from steadytrain.components.tune.search import search
    from steadytrain.pipelines.interrupts import say

    try:
        with driving(config) as log:
            return search(config, log, watcher, tell, write=write, first=first)
    except Stopped:
        say("stopped; nothing is lost: the same command continues the study")
        raise


def check_installed(package: str, purpose: str) -> None:
    """Check that a package of the extra `train` is installed.

    Raises:
        BadInput: it is not.
    """
    if find_spec(package) is None:
        raise BadInput(
            f"{purpose} the package {package}, which is not installed",
            remedy="pip install 'steadytrain[train]'",
        )
