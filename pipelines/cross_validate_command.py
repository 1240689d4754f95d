"""`steadytrain cross-validate`: train and score a configuration on every fold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from steadytrain.pipelines import json_output
from steadytrain.pipelines.json_output import Json
from steadytrain.pipelines.options import Overrides, RunOutput, Source, check_extra, given

if TYPE_CHECKING:
    from steadytrain.components.shared.config import RunConfig


def cross_validate(
    source: Source,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    run: Annotated[
        str | None,
        typer.Option("--run", help="Name of the cross-validation. The same name continues it."),
    ] = None,
    output: RunOutput = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the folds and the runs, and exit.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train on all folds but one, score on that one, for each of `cross_validation.folds`.

    The folds divide the training side; the test side is in none of them. Each run is an ordinary
    one, and all share the encoded data. `cross_validation.compare` names further configurations,
    which are compared on the same folds. The cross-validation can be stopped or killed at any time:
    the same command continues it. The result is in OUTPUT/studies/NAME: cross-validation.json,
    out-of-fold.parquet with a prediction for each record, and report.html.
    """
    from steadytrain.components.shared.config import load
    from steadytrain.components.tune.designs import as_cross_validation, check_folds
    from steadytrain.pipelines.plugin_checks import check_plugins

    config = load(source, given(overrides, run=run, output=output))
    check_folds(config)
    config = as_cross_validation(config)
    check_extra("train", "steadytrain cross-validate")
    check_plugins(config)
    if dry_run:
        _show_outline(config, as_json=as_json)
    else:
        _cross_validate(config, as_json=as_json)


def _cross_validate(config: RunConfig, *, as_json: bool) -> None:
    from steadytrain.components.tune.cross_validation import (
        ending,
        results_of,
        summary,
        words,
        write_cross_validation,
    )
    from steadytrain.components.tune.display import Lines
    from steadytrain.components.tune.driver import study_folder
    from steadytrain.components.tune.folds import checked_start
    from steadytrain.pipelines.studies import run_study

    folder = study_folder(config)
    tell: Callable[[str], object] = (lambda _: None) if as_json else typer.echo
    lines, first = Lines(tell, words(config)), partial(checked_start, config)
    study = run_study(config, lines, tell, write=write_cross_validation, first=first)
    results = results_of(study, folder)
    if as_json:
        json_output.show({**summary(study, results), "folder": str(folder)})
    else:
        typer.echo("\n".join([*ending(study, results), f"folder  {folder}"]))


def _show_outline(config: RunConfig, *, as_json: bool) -> None:
    from steadytrain.components.tune.cross_validation import outline
    from steadytrain.components.tune.designs import configurations
    from steadytrain.components.tune.driver import study_folder
    from steadytrain.components.tune.folds import fold_sizes
    from steadytrain.components.tune.search import UNKNOWN, with_known_steps
    from steadytrain.components.tune.study import study_name
    from steadytrain.pipelines.studies import training_cost

    folds = fold_sizes(config)
    known = with_known_steps(config, study_folder(config))
    steps, hours, text = None, None, f"unknown: the steps are {UNKNOWN}"
    if known is not None:
        steps = known.tune.budget.trials * known.training.max_steps
        hours, text = training_cost(known, steps)
    if not as_json:
        typer.echo("\n".join(outline(config, steps, text, folds)))
        return
    json_output.show(
        {
            "study": study_name(config),
            "folds": config.cross_validation.folds,
            "records": folds.sizes,
            "warnings": folds.warnings,
            "configurations": list(configurations(config)),
            "trials": config.tune.budget.trials,
            "steps": steps,
            "expected_hours": hours,
        }
    )
