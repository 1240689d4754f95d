"""`steadytrain ablate`: what each change contributes, with its uncertainty."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steadytrain.components.shared.errors import BadInput
from steadytrain.pipelines import json_output
from steadytrain.pipelines.json_output import Json
from steadytrain.pipelines.options import Overrides, RunOutput, Source, check_extra, given

if TYPE_CHECKING:
    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.tune.study import Study


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
    from steadytrain.pipelines.plugin_checks import check_plugins

    config = load(source, given(overrides, run=run, output=output))
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
        _show_outline(config, as_json=as_json)
    else:
        _ablate(config, as_json=as_json)


def _ablate(config: RunConfig, *, as_json: bool) -> None:
    from steadytrain.components.tune.ablation import summary
    from steadytrain.components.tune.display import Lines
    from steadytrain.components.tune.driver import study_folder
    from steadytrain.pipelines.ablation_display import ending, words
    from steadytrain.pipelines.studies import run_study

    folder = study_folder(config)
    tell: Callable[[str], object] = (lambda _: None) if as_json else typer.echo
    study = run_study(config, Lines(tell, words(config)), tell, write=_write)
    if as_json:
        json_output.show({**summary(study), "folder": str(folder)})
    else:
        typer.echo("\n".join([*ending(study), f"folder  {folder}"]))


def _write(study: Study, folder: Path) -> None:
    from steadytrain.components.tune.ablation import render, write_results
    from steadytrain.components.tune.study_page import write_page

    write_results(study, folder)
    write_page(render(study), folder)


def _show_outline(config: RunConfig, *, as_json: bool) -> None:
    from steadytrain.components.tune.designs import comparisons, variants
    from steadytrain.components.tune.driver import study_folder
    from steadytrain.components.tune.search import with_known_steps
    from steadytrain.components.tune.study import study_name
    from steadytrain.pipelines.ablation_display import outline

    known = with_known_steps(config, study_folder(config))
    steps = None if known is None else config.tune.budget.trials * known.training.max_steps
    if not as_json:
        typer.echo("\n".join(outline(config, steps)))
        return
    json_output.show(
        {
            "study": study_name(config),
            "variants": variants(config.ablation),
            "comparisons": len(list(comparisons(config.ablation))),
            "trials": config.tune.budget.trials,
            "steps": steps,
        }
    )
