"""What `steadytrain ablate` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from steadytrain.components.pages.charts import aligned
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.studies import DESIGNS
from steadytrain.components.tune.ablation import effects_of
from steadytrain.components.tune.comparisons import row
from steadytrain.components.tune.designs import SEED, Design, comparisons, variant_name, variants
from steadytrain.components.tune.display import spent
from steadytrain.components.tune.history import Trial
from steadytrain.components.tune.search import UNKNOWN
from steadytrain.components.tune.study import Study, study_name

_HEADER = ("change", "difference", "interval", "p (Holm)", "seeds", "verdict")


def words(config: RunConfig) -> Callable[[Trial], str]:
    """Return what describes a trial: its variant and its seed."""
    design, changes = Design(config), len(config.ablation.changes)

    def describe(trial: Trial) -> str:
        return f"{variant_name(design.variant(trial), changes)}, seed {trial.params[SEED]}"

    return describe


def outline(config: RunConfig, steps: int | None) -> list[str]:
    """Return lines on what an ablation would do, for `--dry-run`.

    Args:
        steps: optimizer steps of all trials together; None if they are not known yet.
    """
    ablation, budget = config.ablation, config.tune.budget
    found, objective = variants(ablation), config.tune.objective
    return [
        f"ablation    {study_name(config)}",
        f"objective   {objective.direction} {objective.metric}",
        f"designs     {', '.join(design.replace('_', ' ') for design in ablation.designs)}: "
        f"{len(list(comparisons(ablation)))} comparisons",
        f"trials      {budget.trials:,}: {len(found)} variants on {ablation.seeds} seeds, "
        f"{budget.parallel} at a time",
        f"steps       {UNKNOWN if steps is None else f'{steps:,}'}",
        *(f"variant     {variant_name(item, len(ablation.changes))}" for item in found),
    ]


def ending(study: Study) -> list[str]:
    """Return lines on what an ablation found."""
    total = f"{len(study.history.trials):,} of {study.tune.budget.trials:,}"
    return ["", f"trials  {total}, {spent(study)}", *_tables(study)]


def _tables(study: Study) -> Iterator[str]:
    effects = effects_of(study)
    for design in DESIGNS:
        rows = [
            (name, *cells)
            for item in effects
            if item.comparison.design == design
            for name, cells in [row(item.comparison.change, item)]
        ]
        if rows:
            yield from ("", f"{design.replace('_', ' ')}: {study.tune.objective.metric}")
            yield from aligned([_HEADER, *rows])
    confidence = study.config.ablation.confidence
    yield f"The intervals hold together with a probability of {confidence:.4g}."
