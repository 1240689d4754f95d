"""`steadytrain tune`: search for better settings within a budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steadytrain.pipelines import json_output
from steadytrain.pipelines.json_output import Json
from steadytrain.pipelines.options import Overrides, RunOutput, Source, check_extra, given

if TYPE_CHECKING:
    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.tune.study import Study

_SAMPLES = 3


def tune(
    source: Source,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    run: Annotated[
        str | None, typer.Option("--run", help="Name of the study. The same name continues it.")
    ] = None,
    output: RunOutput = None,
    other: Annotated[
        str,
        typer.Option("--from", metavar="STUDY", help="Try the best trials of another study first."),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what the study would do, and exit.")
    ] = False,
    lr_range: Annotated[
        bool,
        typer.Option(
            "--lr-range",
            help="Instead of a study: find the learning rates at which the loss falls, in one "
            "short run. Nothing is changed.",
        ),
    ] = False,
    export_optuna: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Write the study to an Optuna storage, such as sqlite:///study.db, for "
            "optuna-dashboard.",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Search for better settings: `tune.space` says which, `tune.budget` how long.

    Each trial is an ordinary run that pauses at a rung and continues from its checkpoint if it is
    promoted. The study can be stopped or killed at any time: the same command continues it, and so
    does one with a larger budget. The result is in OUTPUT/studies/STUDY: best.yaml, which
    `steadytrain run` takes, tuning.json, and report.html. `steadytrain submit --pipeline tune` runs
    it on a cluster.
    """
    from steadytrain.components.shared.config import load
    from steadytrain.components.tune.study import check_space
    from steadytrain.pipelines.plugin_checks import check_plugins

    config = load(source, given(overrides, run=run, output=output))
    check_extra("train", "steadytrain tune")
    if lr_range:
        check_plugins(config)
        _show_range(config, as_json=as_json)
        return
    check_space(config)
    check_plugins(config)
    if dry_run:
        _show_outline(config, as_json=as_json)
        return
    _tune(config, other, export_optuna, as_json=as_json)


def _tune(config: RunConfig, other: str, export_optuna: str, *, as_json: bool) -> None:
    from steadytrain.components.tune.display import Lines, ending
    from steadytrain.components.tune.driver import study_folder
    from steadytrain.components.tune.results import summary
    from steadytrain.components.tune.search import first_trials, write_study
    from steadytrain.pipelines.studies import run_study

    if export_optuna:
        from steadytrain.components.tune.export import check_storage

        check_storage(export_optuna)
    folder = study_folder(config)
    tell: Callable[[str], object] = (lambda _: None) if as_json else typer.echo
    first = partial(first_trials, config, other)
    study = run_study(config, Lines(tell), tell, write=write_study, first=first)
    if export_optuna:
        _export(study, export_optuna)
    if not as_json:
        typer.echo("\n".join([*ending(study), f"folder  {folder}"]))
    winner = _retrain(study)
    if as_json:
        json_output.show({**summary(study), **winner, "folder": str(folder)})
    elif winner["winner"]:
        typer.echo(f"winner  run {winner['winner']}: {winner['gate']}")


def _retrain(study: Study) -> dict[str, Any]:
    """Train the best configuration on fresh seeds and let the best model go through the gate.

    Raises:
        SteadytrainError: no trial has finished, or a step of the winner's run failed.
    """
    from steadytrain.components.tune.step import best_of

    config, tune = best_of(study), study.tune
    if not tune.seeds:
        return {"winner": None, "promoted": None, "gate": None}
    from steadytrain.components.tune.trials.retrain import fresh_seeds, retrain

    done = retrain(
        config,
        fresh_seeds(config, tune.seeds),
        compared=len(study.history.trials),
        greater_is_better=tune.objective.direction == "maximize",
    )
    return {
        "winner": done.config.run_id,
        "promoted": done.gate.promoted,
        "gate": done.gate.reason,
    }


def _show_range(config: RunConfig, *, as_json: bool) -> None:
    """Run a learning-rate range test, and show the range that it suggests."""
    from steadytrain.components.shared.stopping import stoppable
    from steadytrain.components.tune.lr_range import (
        range_folder,
        range_test,
        render,
        sentence,
        setting,
    )
    from steadytrain.components.tune.study_page import write_page
    from steadytrain.components.tune.trials.local import local_trials

    folder = range_folder(config)
    with stoppable() as stopping:
        found = range_test(config, lambda study: local_trials(study, parallel=1), stopping.check)
    write_page(render(found, folder.name), folder)
    if as_json:
        json_output.show({**found.model_dump(), "folder": str(folder)})
        return
    typer.echo(sentence(found))
    if option := setting(found):
        typer.echo(f"a study over this range: {option}")
    typer.echo(f"folder  {folder}")


def _export(study: Study, url: str) -> None:
    from steadytrain.components.tune.export import export

    name = export(study, url)
    typer.echo(f"wrote study {name} to the Optuna storage", err=True)


def _show_outline(config: RunConfig, *, as_json: bool) -> None:
    from steadytrain.components.tune.display import outline
    from steadytrain.components.tune.driver import study_folder
    from steadytrain.components.tune.log import MemoryLog
    from steadytrain.components.tune.results import expected_steps
    from steadytrain.components.tune.search import first_trials, with_known_steps
    from steadytrain.components.tune.study import Study, study_name
    from steadytrain.pipelines.studies import training_cost

    known = with_known_steps(config, study_folder(config))
    if known is None:
        _show_without_steps(config, as_json=as_json)
        return
    config = known
    study = Study(config, MemoryLog(), first=lambda: first_trials(known))
    samples = list[dict[str, Any]]()
    while len(samples) < _SAMPLES and (found := study.next()):
        samples.append(dict(study.history.trials[found.number].params))
    steps = expected_steps(study.rungs, config.tune.budget.trials)
    hours, text = training_cost(config, steps)
    if not as_json:
        typer.echo("\n".join(outline(study, samples, steps, text)))
        return
    json_output.show(
        {
            "study": study_name(config),
            "rungs": list(study.rungs.cuts),
            "rung_tokens": study.rung_tokens,
            "brackets": study.rungs.brackets,
            "budget": config.tune.budget.model_dump(),
            "expected_steps": steps,
            "expected_hours": hours,
            "expected_usd": None if hours is None else study.usd(hours),
            "samples": samples,
        }
    )


def _show_without_steps(config: RunConfig, *, as_json: bool) -> None:
    """Show what is known of a study before its data are prepared, which counts its steps."""
    from steadytrain.components.tune.display import outline_without_steps
    from steadytrain.components.tune.study import study_name

    if not as_json:
        typer.echo("\n".join(outline_without_steps(config)))
        return
    unknown = dict.fromkeys(
        ("rungs", "rung_tokens", "brackets", "expected_steps", "expected_hours", "expected_usd")
    )
    budget = config.tune.budget.model_dump()
    json_output.show({"study": study_name(config), **unknown, "budget": budget, "samples": []})
