"""Import the plugins that a run uses, so that a broken one is found before anything starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Final

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput, ConfigError, Problem
from steadytrain.components.shared.tracking.parallel import check_package

_LOADERS: Final = {
    plugins.TASKS: "steadytrain.components.tasks.registry:load_task",
    plugins.TRAINERS: "steadytrain.components.train.step:load_trainer",
    plugins.ORDERS: "steadytrain.components.train.loop.order:load_order",
    plugins.SINKS: "steadytrain.components.train.step:load_sink",
    plugins.METRICS: "steadytrain.components.evaluate.metric:load_metric",
}
"""What loads and checks a plugin, by group. These modules are slow, and imported only if another
package adds something there."""


def check_plugins(config: RunConfig) -> None:
    """Reject a run whose plugins cannot be used.

    The configuration itself has imported the specs that it needs: schedules, optimizers,
    strategies and training components. Metrics are checked whether the configuration names them or
    not, because evaluation computes all of them.

    On a machine without torch, which submits runs but trains none, this does nothing: plugins may
    need what only the images have.

    Raises:
        ConfigError: with every plugin that cannot be imported, or is not what its group needs; or
            with every setting that the task does not support.
    """
    if importlib.util.find_spec("torch") is None:
        return
    problems: list[Problem] = []
    for field, group, name in _used(config):
        options = [config.training.order_options] if group == plugins.ORDERS else []
        try:
            resolve_name(_LOADERS[group])(name, *options)
        except BadInput as error:
            problems.append(Problem(field, repr(name), error.message, error.remedy))
    for name in config.sinks:
        try:
            check_package(name)
        except BadInput as error:
            problems.append(Problem("tracking.sinks", repr(name), error.message, error.remedy))
    if problems:
        raise ConfigError(problems)
    # Imported late, with pyarrow.
    from steadytrain.components.tasks.checks import check_task

    check_task(config)


def _used(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the plugins of other packages: the field, the group and the name."""
    named = [
        ("data.task", plugins.TASKS, [config.data.task]),
        ("model.framework", plugins.TRAINERS, [config.model.framework]),
        ("training.order", plugins.ORDERS, [config.training.order]),
        ("tracking.sinks", plugins.SINKS, config.tracking.sinks),
        ("evaluation", plugins.METRICS, plugins.names(plugins.METRICS)),
    ]
    for field, group, names in named:
        foreign = plugins.others(group)
        yield from ((field, group, name) for name in names if name in foreign or ":" in name)
