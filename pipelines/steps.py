"""Run a single step, as the pipeline would."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines.lock import run_lock

_LINGER_SECONDS = 30.0
"""A deleted pod may still be shutting down when its successor starts."""


def run_step(name: str, config: RunConfig) -> str:
    """Run one step on what the earlier steps wrote to the run's folder.

    Returns:
        Its record as JSON, or the path of what it wrote.

    Raises:
        BadInput: there is no such step, or the earlier steps have not run.
        RunBusy: another process is using the run.
    """
    if name not in _STEPS:
        raise BadInput(f"unknown step {name!r}", remedy=f"one of {', '.join(_STEPS)}")
    workspace = Workspace.of(config)
    workspace.create()
    with run_lock(workspace, linger_seconds=_LINGER_SECONDS):
        return _STEPS[name](config)


def _preprocess(config: RunConfig) -> str:
    from steadytrain.components.preprocess.step import run
    from steadytrain.components.shared.start_run import start_run
    from steadytrain.components.train.recovery.ownership import owned

    with owned(config):
        start_run(config)
    return run(config).model_dump_json(indent=2)


def _train(config: RunConfig) -> str:
    from steadytrain.components.train.step import run_stage

    return run_stage(config).model_dump_json(indent=2)


def _evaluate(config: RunConfig) -> str:
    from steadytrain.components.evaluate.step import run

    return "\n".join(record.model_dump_json(indent=2) for record in run(config))


def _register(config: RunConfig) -> str:
    from steadytrain.components.register.step import run

    return run(config).model_dump_json(indent=2)


def _promote(config: RunConfig) -> str:
    from steadytrain.components.register.promote import promote

    return promote(config).model_dump_json(indent=2)


def _report(config: RunConfig) -> str:
    from steadytrain.components.report.step import run

    return str(run(config))


_STEPS: Mapping[str, Callable[[RunConfig], str]] = {
    "preprocess": _preprocess,
    "train": _train,
    "evaluate": _evaluate,
    "register": _register,
    "promote": _promote,
    "report": _report,
}
