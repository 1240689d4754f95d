"""Plugins that installed packages add through entry points, with one group per kind.

steadytrain's own entries use the same groups (pyproject.toml), so there is only one way in.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from steadytrain.components.shared.errors import BadInput

METRICS = "steadytrain.metrics"
"""Objects with the methods of `evaluate.metric.Metric`."""
SINKS = "steadytrain.sinks"
"""Functions that take a RunConfig and a Workspace and return an `events.Sink`."""
TRAINERS = "steadytrain.trainers"
"""Functions with the signature of `train.step.Trainer`."""
STRATEGIES = "steadytrain.strategies"
"""Objects of the class `config.strategies.StrategySpec`."""
_OURS = "steadytrain"


def names(group: str) -> list[str]:
    """Return all names in a group, sorted, without importing anything."""
    return sorted({point.name for point in entry_points(group=group)})


def load(group: str, name: str) -> Any:
    """Import and return the object that a name refers to.

    Raises:
        BadInput: if no package provides the name, several do, or it cannot be imported.
    """
    points = {point.value: point for point in entry_points(group=group, name=name)}
    if not points:
        raise _unknown(group, [name])
    if len(points) > 1:
        owners = ", ".join(sorted(map(_owner, points.values())))
        raise BadInput(
            f"{name!r} in {group} comes from several packages: {owners}",
            remedy="uninstall all but one of them",
        )
    (point,) = points.values()
    try:
        return point.load()
    except Exception as error:
        raise BadInput(
            f"{name!r} in {group} cannot be imported from {_owner(point)}: {error}",
            remedy="fix or uninstall that package",
        ) from error


def check(group: str, wanted: Iterable[str]) -> None:
    """Reject names that no installed package provides.

    Raises:
        BadInput: if a name is unknown. The fix lists the known names.
    """
    if missing := sorted(set(wanted) - set(names(group))):
        raise _unknown(group, missing)


def _unknown(group: str, missing: Iterable[str]) -> BadInput:
    return BadInput(
        f"no installed package has {', '.join(missing)} in {group}",
        remedy=f"use one of {', '.join(names(group))}, or install the package",
    )


def added(group: str) -> list[str]:
    """Return a line for each entry of other packages, with its version: results depend on them."""
    return sorted(
        f"{point.name} = {point.value} of {_owner(point)}"
        for point in entry_points(group=group)
        if point.dist is None or point.dist.name != _OURS
    )


def _owner(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unnamed package"
