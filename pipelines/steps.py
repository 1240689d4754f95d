"""Run a single step, as the pipeline would."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.document import shortened
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import Cursor
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.left_out import in_one_line
from steadytrain.components.shared.log import step_format
from steadytrain.components.shared.records import DataRecord, Record
from steadytrain.components.shared.redaction import printable
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.agent.fork_server import ForkServer
from steadytrain.pipelines.options import Extra, check_extra
from steadytrain.pipelines.runs import run_lock

_LINGER_SECONDS = 30.0
"""A deleted pod may still be shutting down when its successor starts."""


Written = Mapping[str, Record | Path]
"""What a step wrote: its records by name, or the paths of files."""


def run_step(name: str, config: RunConfig) -> Written:
    """Run one step on what the earlier steps wrote to the run's folder.

    Raises:
        BadInput: there is no such step, packages are missing, or the earlier steps have not run.
        RunBusy: another process is using the run.
    """
    if name not in _STEPS:
        raise BadInput(f"unknown step {name!r}", remedy=f"one of {', '.join(_STEPS)}")
    check_extra(_EXTRAS.get(name, "train"), f"the step {name}")
    workspace = Workspace.of(config)
    workspace.create()
    with run_lock(workspace, linger_seconds=_LINGER_SECONDS):
        return perform(name, config)


def perform(name: str, config: RunConfig, agent: ForkServer | None = None) -> Written:
    """Run one step for a process that holds the run's lock.

    Args:
        agent: for a step that trains, if it was forked before.
    """
    return _train(config, agent) if name == "train" else _STEPS[name](config)


@contextlib.contextmanager
def reported_warnings(config: RunConfig) -> Iterator[None]:
    """Print the warnings of a step at its end, unless the step writes a log itself."""
    cursor = Cursor(Workspace.of(config).events)
    cursor.skip_to_end()
    try:
        yield
    finally:
        if step_format(config) is None:
            for event in cursor.new():
                if isinstance(event, Warned):
                    typer.echo(f"warning: {event.stage}: {printable(event.message)}", err=True)


def as_text(item: Record | Path) -> str:
    """Return what a step wrote as text: a record as JSON, data as a summary, or a path."""
    if isinstance(item, DataRecord):
        return "\n".join(_of_data(item))
    return item.model_dump_json(indent=2) if isinstance(item, Record) else str(item)


def _of_data(data: DataRecord) -> Iterator[str]:
    """Yield a summary of prepared data. The whole record has hundreds of lines."""
    yield f"data         {data.folder}"
    yield f"fingerprint  {data.fingerprint}"
    for name, side in data.sides.items():
        tokens = f", {side.tokens:,} tokens" if side.tokens else ""
        yield f"{name:11}  {side.documents:,} records in {side.rows:,} rows{tokens}"
    if data.labels:
        yield f"labels       {len(data.labels)}: {shortened(', '.join(data.labels))}"
    card = json.loads(data.path("card.json").read_text(encoding="utf-8"))
    yield f"records      {in_one_line(data, card)}"
    yield f"card         {data.path('card.html')}"
    yield "--json prints the whole record"


def as_plain(item: Record | Path) -> Any:
    """Return what a step wrote as plain data."""
    return item.model_dump(mode="json") if isinstance(item, Record) else str(item)


def _preprocess(config: RunConfig) -> Written:
    from steadytrain.components.preprocess.step import run
    from steadytrain.components.train.recovery.takeover import begin_run

    begin_run(config)
    return {"preprocess": run(config)}


def _tune(config: RunConfig) -> Written:
    from steadytrain.components.tune.driver import study_folder
    from steadytrain.components.tune.results import BEST, SUMMARY
    from steadytrain.components.tune.step import run

    run(config)
    folder = study_folder(config)
    return {"best": folder / BEST, "tuning": folder / SUMMARY}


def _search(config: RunConfig) -> Written:
    from steadytrain.components.automl.results import BOARD
    from steadytrain.components.automl.step import named, run
    from steadytrain.components.tune.driver import study_folder
    from steadytrain.components.tune.results import BEST

    run(config)
    folder = study_folder(named(config))
    return {"best": folder / BEST, "board": folder / BOARD}


def _cross_validate(config: RunConfig) -> Written:
    from steadytrain.components.tune.cross_validation import PREDICTIONS, SUMMARY
    from steadytrain.components.tune.designs import as_cross_validation
    from steadytrain.components.tune.driver import study_folder
    from steadytrain.components.tune.step import run_cross_validation

    run_cross_validation(config)
    folder = study_folder(as_cross_validation(config))
    return {"summary": folder / SUMMARY, "predictions": folder / PREDICTIONS}


def _train(config: RunConfig, agent: ForkServer | None = None) -> Written:
    from steadytrain.components.train.step import run_stage

    return {"train": run_stage(config, agent=agent)}


def _evaluate(config: RunConfig) -> Written:
    from steadytrain.components.evaluate.step import run

    return dict(zip(("evaluate", "gate"), run(config), strict=True))


def _register(config: RunConfig) -> Written:
    from steadytrain.components.register.step import run

    return {"register": run(config)}


def _promote(config: RunConfig) -> Written:
    from steadytrain.components.register.step import promote

    return {"promote": promote(config)}


def _report(config: RunConfig) -> Written:
    from steadytrain.components.report.step import notify, run

    try:
        return {"report": run(config)}
    finally:
        notify(Workspace.of(config))


_STEPS: Mapping[str, Callable[[RunConfig], Written]] = {
    "preprocess": _preprocess,
    "tune": _tune,
    "search": _search,
    "cross-validate": _cross_validate,
    "train": _train,
    "evaluate": _evaluate,
    "register": _register,
    "promote": _promote,
    "report": _report,
}

_EXTRAS: Mapping[str, Extra] = {"preprocess": "data", "report": "data"}
"""Steps that need no torch."""
