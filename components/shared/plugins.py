"""Plugins that installed packages add through entry points, with one group per kind.

steadytrain's own entries use the same groups (pyproject.toml), so there is only one way in.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import Distribution, EntryPoint, EntryPoints, entry_points
from typing import Any, TypeVar

from steadytrain.components.shared.errors import BadInput, SteadytrainError
from steadytrain.components.shared.foreign import foreign, raised_by_code
from steadytrain.components.shared.redaction import on_one_line

T = TypeVar("T")
METRICS = "steadytrain.metrics"
"""Objects with the methods of `evaluate.metric.Metric`."""
TASKS = "steadytrain.tasks"
"""Objects of `tasks.base.Task`."""
ORDERS = "steadytrain.orders"
"""Functions that take (rows, seed, lengths, batch) and return a `techniques.order.Order`."""
FAMILIES = "steadytrain.families"
"""Objects of the class `automl.portfolio.Family`."""
SINKS = "steadytrain.sinks"
"""Functions with the signature of `train.step.OpenSink`."""
COMPONENTS = "steadytrain.training_components"
"""Functions that take options as keyword arguments and return a
`techniques.base.TrainingComponent`."""
TRAINERS = "steadytrain.trainers"
"""Functions with the signature of `train.step.Trainer`."""
OPTIMIZERS = "steadytrain.optimizers"
"""Objects of the class `config.optimizers.OptimizerSpec`."""
SCHEDULES = "steadytrain.schedules"
"""Objects of the class `config.schedules.ScheduleSpec`."""
STRATEGIES = "steadytrain.strategies"
"""Objects of the class `config.strategies.StrategySpec`."""
_OURS = "steadytrain"
_FIX = "fix or uninstall that package"


def _installed(group: str) -> EntryPoints:
    return _listed(tuple(sys.path)).get(group, EntryPoints())


@functools.lru_cache(maxsize=4)
def _listed(_path: tuple[str, ...]) -> Mapping[str, EntryPoints]:
    """Return the entry points by group. Going through all installed packages takes 10 ms."""
    installed = entry_points()
    ours = (group for group in installed.groups if group.startswith(f"{_OURS}."))
    return {group: installed.select(group=group) for group in ours}


def _named(group: str, name: str) -> EntryPoints:
    return _selected(tuple(sys.path), group, name)


@functools.lru_cache(maxsize=256)
def _selected(path: tuple[str, ...], group: str, name: str) -> EntryPoints:
    return _listed(path).get(group, EntryPoints()).select(name=name)


def names(group: str) -> list[str]:
    """Return all names in a group, sorted, without importing anything."""
    return sorted({point.name for point in _installed(group)})


def find(group: str, name: str) -> EntryPoint:
    """Return the entry point that a name refers to, without importing anything.

    Raises:
        BadInput: if no package provides the name, or several do.
    """
    points = {point.value: point for point in _named(group, name)}
    if not points:
        raise _unknown(group, [name])
    if len(points) > 1:
        owners = ", ".join(sorted(map(_owner, points.values())))
        raise BadInput(
            f"{name!r} in {group} comes from several packages: {owners}",
            remedy="uninstall all but one of them",
        )
    (point,) = points.values()
    return point


def load(group: str, name: str) -> Any:
    """Import and return the object that a name refers to.

    Raises:
        BadInput: as for `find`, or if the object cannot be imported.
    """
    point = find(group, name)
    if _is_ours(point):
        return _load_ours(point)
    what = f"{name!r} in {group} cannot be imported from {_owner(point)}"
    with foreign(what, _FIX, runs_code=True):
        return point.load()


def _load_ours(point: EntryPoint) -> Any:
    try:
        return point.load()
    except ModuleNotFoundError as error:
        raise BadInput(
            f"{point.name!r} in {point.group} needs the package {error.name}, which is not "
            "installed",
            remedy=f"pip install '{_OURS}[train]'",
        ) from error


def load_as(group: str, name: str, kind: type[T]) -> T:
    """Import and return the object that a name refers to, which must fit a class or a protocol.

    Args:
        kind: a class, or a runtime-checkable protocol.

    Raises:
        BadInput: as for `load`, or if the object is something else. The message lists what it
            lacks.
    """
    result = load(group, name)
    if not isinstance(result, kind):
        lacking = [part for part in vars(kind) if part[0] != "_" and not hasattr(result, part)]
        lacks = f": it has no {', '.join(lacking)}" if lacking else ""
        raise BadInput(
            f"{name!r} in {group} is {result!r:.80}, not an object of {kind.__name__}{lacks}",
            remedy=_FIX,
        )
    return result


def address(group: str, name: str) -> str:
    """Return the `module:object` that a name refers to, without importing it; "" if unknown."""
    return next((point.value for point in _named(group, name)), "")


def is_ours(group: str, name: str) -> bool:
    """Return whether a name is steadytrain's own, and no other package provides it too."""
    points = _named(group, name)
    return bool(points) and all(map(_is_ours, points))


def create(group: str, name: str, options: Mapping[str, Any]) -> Any:
    """Import the function that a name refers to and call it with options as keyword arguments.

    Raises:
        BadInput: as for `load`, or if the function rejects the options.
    """
    function = load(group, name)
    if not callable(function):
        raise BadInput(f"{name!r} in {group} is {function!r}, not a function or class", remedy=_FIX)
    return call(function, options, f"{name!r} in {group}")


def call(function: Callable[..., T], options: Mapping[str, Any], plugin: str) -> T:
    """Call a plugin's function with options as keyword arguments.

    Raises:
        BadInput: it rejects them. The message names the plugin, and the fix has the signature.
    """
    if function is no_options and options:
        raise BadInput(
            f"{plugin} has no options, such as {next(iter(options))}", remedy="leave it out"
        )
    try:
        return function(**options)
    except BaseException as error:
        if not isinstance(error, SteadytrainError) and not raised_by_code(error):
            raise
        raise BadInput(
            f"{plugin} rejects its options: {error or type(error).__name__}",
            remedy=f"its options are {inspect.signature(function)}",
        ) from error


def no_options() -> None:
    """Take no options: what a spec has if its plugin has none."""


def check(group: str, wanted: Iterable[str]) -> None:
    """Reject names that no installed package provides.

    Raises:
        BadInput: if a name is unknown. The fix lists the known names.
    """
    if missing := sorted(set(wanted) - set(names(group))):
        raise _unknown(group, missing)


def _unknown(group: str, missing: Iterable[str]) -> BadInput:
    known = ", ".join(names(group))
    install = "install the package that adds it"
    return BadInput(
        f"no installed package has {', '.join(missing)} in {group}",
        remedy=f"use one of {known}, or {install}" if known else install,
    )


def others(group: str) -> set[str]:
    """Return the names that other packages provide."""
    return {point.name for point in _installed(group) if not _is_ours(point)}


def added(group: str) -> list[str]:
    """Return a line for each entry of other packages, with its version: results depend on them."""
    return sorted(described(point) for point in _installed(group) if not _is_ours(point))


def _is_ours(point: EntryPoint) -> bool:
    """Return whether an entry is steadytrain's own: metadata may claim any name."""
    named = point.dist is not None and _name(point.dist) == _OURS
    return named and point.module.startswith(f"{_OURS}.")


def described(point: EntryPoint) -> str:
    """Return an entry in one line, with the version of its package."""
    return f"{point.name} = {point.value} of {_owner(point)}"


def _owner(point: EntryPoint) -> str:
    return _package(point.dist) if point.dist else "an unnamed package"


# Each property of a package parses its metadata, which takes milliseconds.
@functools.cache
def _package(package: Distribution) -> str:
    return on_one_line(f"{package.name} {package.version}")


@functools.cache
def _name(package: Distribution) -> str:
    return _normalized(package.name or "")


def _normalized(name: str) -> str:
    """Return a package's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
