"""`steadytrain tune`, `ablate` and `cross-validate`: run a study until it is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steadytrain.components.shared.errors import BadInput, SteadytrainError, Stopped
from steadytrain.pipelines import options
from steadytrain.pipelines.options import (
    Json,
    Overrides,
    RunOutput,
    Source,
    check_extra,
    with_options,
)

if TYPE_CHECKING:
    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.tune.driver import Watcher
    from steadytrain.components.tune.history import Params
    from steadytrain.components.tune.study import NewDesign, Study


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
    from steadytrain.pipelines.early_checks import check_plugins

    config = load(source, with_options(overrides, run=run, output=output))
    check_extra("train", "steadytrain tune")
    if lr_range:
        check_plugins(config)
        _show_range(config, as_json=as_json)
        return
    check_space(config)
    check_plugins(config)
    if dry_run:
        _outline_study(config, as_json=as_json)
        return
    _tune(config, other, export_optuna, as_json=as_json)


def _tune(config: RunConfig, other: str, export_optuna: str, *, as_json: bool) -> None:
    from steadytrain.components.tune.driver import study_folder
    from steadytrain.components.tune.results import Lines, ending, summary
    from steadytrain.components.tune.search import first_trials, write_study

    if export_optuna:
        from steadytrain.components.tune.study import check_storage

        check_storage(export_optuna)
    folder = study_folder(config)
    notify: Callable[[str], object] = (lambda _: None) if as_json else typer.echo
    first = partial(first_trials, config, other)
    study = run_study(config, Lines(notify), notify, write=write_study, first=first)
    if export_optuna:
        _export(study, export_optuna)
    if not as_json:
        typer.echo("\n".join([*ending(study), f"folder  {folder}"]))
    winner = _retrain(study)
    if as_json:
        options.show({**summary(study), **winner, "folder": str(folder)})
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
        study_range = range_test(
            config, lambda study: local_trials(study, parallel=1), stopping.check
        )
    write_page(render(study_range, folder.name), folder)
    if as_json:
        options.show({**study_range.model_dump(), "folder": str(folder)})
        return
    typer.echo(sentence(study_range))
    if option := setting(study_range):
        typer.echo(f"a study over this range: {option}")
    typer.echo(f"folder  {folder}")


def _export(study: Study, url: str) -> None:
    from steadytrain.components.tune.study import export

    name = export(study, url)
    typer.echo(f"wrote study {name} to the Optuna storage", err=True)


def _outline_study(config: RunConfig, *, as_json: bool) -> None:
    from steadytrain.components.tune.driver import study_folder
    from steadytrain.components.tune.log import MemoryLog
    from steadytrain.components.tune.results import expected_steps, outline
    from steadytrain.components.tune.search import first_trials, with_known_steps
    from steadytrain.components.tune.study import Study, study_name

    known = with_known_steps(config, study_folder(config))
    if known is None:
        _show_without_steps(config, as_json=as_json)
        return
    config = known
    study = Study(config, MemoryLog(), first=lambda: first_trials(known))
    samples = list[dict[str, Any]]()
    while len(samples) < _SAMPLES and (suggestion := study.next()):
        samples.append(dict(study.history.trials[suggestion.number].params))
    steps = expected_steps(study.rungs, config.tune.budget.trials)
    hours, text = training_cost(config, steps)
    if not as_json:
        typer.echo("\n".join(outline(study, samples, steps, text)))
        return
    options.show(
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
    from steadytrain.components.tune.results import outline_without_steps
    from steadytrain.components.tune.study import study_name

    if not as_json:
        typer.echo("\n".join(outline_without_steps(config)))
        return
    unknown = dict.fromkeys(
        ("rungs", "rung_tokens", "brackets", "expected_steps", "expected_hours", "expected_usd")
    )
    budget = config.tune.budget.model_dump()
    options.show({"study": study_name(config), **unknown, "budget": budget, "samples": []})


def ablate(
    source: Source,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    run: Annotated[
        str | None,
        typer.Option("--run", help="Name of the ablation. The same name continues it."),
    ] = None,
    output: RunOutput = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the variants and the trials, and exit.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure what each change contributes: `ablation.changes` says which, on several seeds.

    Variants that differ in one change train on the same seeds and are compared in pairs. The
    intervals and p-values hold for all comparisons together. The ablation can be stopped or killed
    at any time: the same command continues it, and so does one with more seeds. The result is in
    OUTPUT/studies/ABLATION: effects.json and report.html.
    """
    from steadytrain.components.shared.config import load
    from steadytrain.components.tune.designs import as_ablation
    from steadytrain.pipelines.early_checks import check_plugins

    config = load(source, with_options(overrides, run=run, output=output))
    if not config.ablation.changes:
        raise BadInput(
            f"ablation.changes of {source} is empty: there is nothing to compare",
            remedy="name changes and the fields that they set, such as ablation: {changes: "
            "{no_decay: {training.weight_decay: 0.0}}}",
        )
    check_extra("train", "steadytrain ablate")
    check_plugins(config)
    config = as_ablation(config)
    if dry_run:
        _outline_ablation(config, as_json=as_json)
    else:
        _ablate(config, as_json=as_json)


def _ablate(config: RunConfig, *, as_json: bool) -> None:
    from steadytrain.components.tune.ablation import ending, summary, words
    from steadytrain.components.tune.driver import study_folder
    from steadytrain.components.tune.results import Lines

    folder = study_folder(config)
    notify: Callable[[str], object] = (lambda _: None) if as_json else typer.echo
    study = run_study(config, Lines(notify, words(config)), notify, write=_write)
    if as_json:
        options.show({**summary(study), "folder": str(folder)})
    else:
        typer.echo("\n".join([*ending(study), f"folder  {folder}"]))


def _write(study: Study, folder: Path) -> None:
    from steadytrain.components.tune.ablation import render, write_results
    from steadytrain.components.tune.study_page import write_page

    write_results(study, folder)
    write_page(render(study), folder)


def _outline_ablation(config: RunConfig, *, as_json: bool) -> None:
    from steadytrain.components.tune.ablation import outline
    from steadytrain.components.tune.designs import comparisons, variants
    from steadytrain.components.tune.driver import study_folder
    from steadytrain.components.tune.search import with_known_steps
    from steadytrain.components.tune.study import study_name

    known = with_known_steps(config, study_folder(config))
    steps = None if known is None else config.tune.budget.trials * known.training.max_steps
    if not as_json:
        typer.echo("\n".join(outline(config, steps)))
        return
    options.show(
        {
            "study": study_name(config),
            "variants": variants(config.ablation),
            "comparisons": len(list(comparisons(config.ablation))),
            "trials": config.tune.budget.trials,
            "steps": steps,
        }
    )


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
    from steadytrain.pipelines.early_checks import check_plugins

    config = load(source, with_options(overrides, run=run, output=output))
    check_folds(config)
    config = as_cross_validation(config)
    check_extra("train", "steadytrain cross-validate")
    check_plugins(config)
    if dry_run:
        _outline_folds(config, as_json=as_json)
    else:
        _cross_validate(config, as_json=as_json)


def _cross_validate(config: RunConfig, *, as_json: bool) -> None:
    from steadytrain.components.tune.cross_validation import (
        checked_start,
        ending,
        results_of,
        summary,
        words,
        write_cross_validation,
    )
    from steadytrain.components.tune.driver import study_folder
    from steadytrain.components.tune.results import Lines

    folder = study_folder(config)
    notify: Callable[[str], object] = (lambda _: None) if as_json else typer.echo
    lines, first = Lines(notify, words(config)), partial(checked_start, config)
    study = run_study(config, lines, notify, write=write_cross_validation, first=first)
    results = results_of(study, folder)
    if as_json:
        options.show({**summary(study, results), "folder": str(folder)})
    else:
        typer.echo("\n".join([*ending(study, results), f"folder  {folder}"]))


def _outline_folds(config: RunConfig, *, as_json: bool) -> None:
    from steadytrain.components.tune.cross_validation import fold_sizes, outline
    from steadytrain.components.tune.designs import configurations
    from steadytrain.components.tune.driver import study_folder
    from steadytrain.components.tune.results import UNKNOWN
    from steadytrain.components.tune.search import with_known_steps
    from steadytrain.components.tune.study import study_name

    folds = fold_sizes(config)
    known = with_known_steps(config, study_folder(config))
    steps, hours, text = None, None, f"unknown: the steps are {UNKNOWN}"
    if known is not None:
        steps = known.tune.budget.trials * known.training.max_steps
        hours, text = training_cost(known, steps)
    if not as_json:
        typer.echo("\n".join(outline(config, steps, text, folds)))
        return
    options.show(
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


def run_study(
    config: RunConfig,
    watcher: Watcher,
    notify: Callable[[str], object],
    *,
    write: Callable[[Study, Path], None],
    first: Callable[[], Sequence[Params]] = list,
    design: NewDesign | None = None,
    imports: Sequence[str] = (),
) -> Study:
    """Run or continue a study. If it is stopped, say how to continue it.

    Args:
        notify, write, first, design, imports: see `search`.

    Raises:
        Stopped: the process was asked to stop; the same command continues the study.
        SteadytrainError: see `driving` and `search`.
    """
    from steadytrain.components.tune.driver import driving
    from steadytrain.components.tune.search import search
    from steadytrain.pipelines.local import print_line

    try:
        with driving(config) as log:
            return search(
                config,
                log,
                watcher,
                notify,
                write=write,
                first=first,
                design=design,
                imports=imports,
            )
    except Stopped:
        print_line("stopped; nothing is lost: the same command continues the study")
        raise


def training_cost(config: RunConfig, steps: int) -> tuple[float | None, str]:
    """Return the hours of training by the planner, and the estimate in words.

    Args:
        steps: optimizer steps of all trials together.
    """
    from steadytrain.components.plan.plan import plan_training
    from steadytrain.components.shared.quantities import duration, money
    from steadytrain.pipelines.plan_hardware import choose_hardware

    try:
        gpus, gpu, hosts, _ = choose_hardware(config)
        plan = plan_training(config, gpus, gpu, hosts)
    except SteadytrainError as error:
        return None, f"unknown: {error.message}"
    if plan.offer.hours is None:
        return None, "unknown: the length of a trial is not known"
    hours = plan.offer.hours.middle * steps / config.training.max_steps
    price = config.compute.price_per_hour
    usd = None if price is None else hours * price
    if usd is None and plan.offer.usd is not None:
        usd = plan.offer.usd.middle * steps / config.training.max_steps
    cost = "" if usd is None else f", {money(usd)}"
    seconds = hours * 3600
    time = f"about {duration(seconds)}" if seconds >= 1 else "less than a second"
    return hours, f"{time} of training on {plan.offer.gpu}{cost} (formula)"
