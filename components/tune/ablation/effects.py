"""The effect of each change of an ablation, over the seeds on which both variants finished."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.tune.design import SEED, Comparison, Design, Variant, comparisons
from steadytrain.components.tune.paired import Estimate, estimates
from steadytrain.components.tune.results import signs
from steadytrain.components.tune.study import Study, study_name

SUMMARY: Final = "effects.json"
Scores = Mapping[Variant, Mapping[int, float]]
"""The score of each variant by seed."""


@dataclass(frozen=True)
class Effect:
    """What a change does to the score.

    pairs: by seed, the score with the change minus the score without it.
    estimate: None if no seed has both scores.
    better: whether the change improves the score; None if the study cannot tell, because Holm's
        p-value is above 1 - confidence.
    """

    comparison: Comparison
    pairs: Mapping[int, float]
    estimate: Estimate | None
    better: bool | None


def scores_of(study: Study) -> Scores:
    """Return the scores of the finished trials, with every variant."""
    design = Design(study.config)
    found: dict[Variant, dict[int, float]] = {variant: {} for variant in design.variants}
    for trial in study.history.trials:
        score = study.history.values(trial)[0]
        if trial.standing == "finished" and math.isfinite(score):
            found[design.variant(trial)][trial.params[SEED]] = score
    return found


def effects_of(study: Study) -> list[Effect]:
    """Return the effect of each change in each design."""
    ablation, scores, sign = study.config.ablation, scores_of(study), signs(study)[0]
    compared = list(comparisons(ablation))
    pairs = [_pairs(scores, item) for item in compared]
    found = estimates([list(item.values()) for item in pairs], ablation.confidence)
    return [
        Effect(comparison, pair, estimate, _better(estimate, sign, 1 - ablation.confidence))
        for comparison, pair, estimate in zip(compared, pairs, found, strict=True)
    ]


def summary(study: Study) -> dict[str, Any]:
    """Return what an ablation found, for programs."""
    scores, history = scores_of(study), study.history
    return {
        "study": study_name(study.config),
        "objective": study.tune.objective.model_dump(),
        "confidence": study.config.ablation.confidence,
        "variants": [
            {
                "changes": list(variant),
                "mean": statistics.fmean(found.values()) if found else None,
                "scores": found,
            }
            for variant, found in scores.items()
        ],
        "effects": [_as_plain(effect) for effect in effects_of(study)],
        "trials": len(history.trials),
        "trials_failed": history.failed,
        "seconds": round(history.seconds, 3),
        "usd": study.usd(study.hours),
    }


def write_results(study: Study, folder: Path) -> None:
    """Write `effects.json`."""
    text = json.dumps(summary(study), indent=2)
    LocalStorage(folder).write(SUMMARY, f"{text}\n".encode())


def _pairs(scores: Scores, item: Comparison) -> dict[int, float]:
    changed, unchanged = scores[item.changed], scores[item.unchanged]
    return {seed: changed[seed] - unchanged[seed] for seed in changed if seed in unchanged}


def _better(estimate: Estimate | None, sign: float, level: float) -> bool | None:
    if estimate is None or estimate.p is None or estimate.p > level:
        return None
    return sign * estimate.mean < 0


def _as_plain(effect: Effect) -> dict[str, Any]:
    found = effect.estimate
    return {
        "design": effect.comparison.design,
        "change": effect.comparison.change,
        **(asdict(found) if found else dict.fromkeys(("mean", "low", "high", "p"))),
        "better": effect.better,
        "pairs": effect.pairs,
    }
