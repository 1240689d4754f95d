"""Check whether the data changed since the current models were trained.

First, compare digests over the input as it is stored. This takes as long as reading local files;
for S3 a listing is enough, and for the Hugging Face Hub the commit. Only if the digests differ,
read every record to measure whether the data have also drifted.

Lengths have an order, so they are compared by the population stability index over their bins,
sum((q - p) ln(q / p)). An empty bin counts as a share of 0.0001. The usual reading (Siddiqi, Credit
Risk Scorecards, 2006): below 0.1 nothing has shifted, and at 0.25 or above the population is
different. Labels and words have no order, so they are compared by the Jensen-Shannon distance to
base 2, the square root of the divergence of Lin (1991). It is between 0 and 1. The default
threshold in Evidently's drift detection is 0.1.

Small data sets differ by chance. The distance between the two halves of each data set shows by how
much. A statistic has moved only if it exceeds that distance too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from steadytrain.components.pages.html import html
from steadytrain.components.preprocess.inputs import Inputs, inputs_of
from steadytrain.components.preprocess.prepared import scratch
from steadytrain.components.preprocess.profile import profile_of
from steadytrain.components.shared.config import RetrainConfig, RunConfig, from_parameters
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.records import DataProfile
from steadytrain.components.shared.registry import INPUTS, PROFILE, Registry, Version
from steadytrain.components.shared.workspace import DataCheck, Workspace, keep_data_check

if TYPE_CHECKING:
    from kfp import dsl


@dataclass(frozen=True)
class DataChange:
    """Whether there is something new to train on, and why, in one sentence.

    moves: how far each statistic of the data has moved since the champion; empty if unknown or not
        measured.
    """

    found: bool
    reason: str
    moves: tuple[Move, ...] = ()


def run(config: RunConfig) -> DataChange:
    """Compare the input with the data of the champion and of the newest candidate.

    The candidate counts too. Otherwise, data whose model the gate refused would be trained on again
    and again.

    Raises:
        BadInput: an address names nothing that can be read.
        TrackingError: the registry cannot be used.
    """
    workspace = Workspace.of(config)
    inputs = inputs_of(config)
    digest = inputs.digest()
    registry, aliases = Registry(config, workspace), config.registry
    for alias in (aliases.champion_alias, aliases.candidate_alias):
        version = registry.by_alias(alias)
        if version and version.tags.get(INPUTS) == digest:
            return DataChange(
                found=False,
                reason=f"nothing new: version {version.number} of {registry.name} ({alias}) was "
                "trained on these data",
            )
    champion = registry.by_alias(aliases.champion_alias)
    if champion is None:
        return DataChange(found=True, reason=f"{registry.name} has no champion yet")
    return _compare(config, inputs, champion, f"version {champion.number} of {registry.name}")


def _compare(config: RunConfig, inputs: Inputs, champion: Version, name: str) -> DataChange:
    """Measure drift in data that differ from the champion's, and decide whether to train again."""
    what = "differ from" if INPUTS in champion.tags else "cannot be compared with"
    shift = f"the data {what} those of the champion, {name}"
    then = _profile_tagged(champion)
    if then is None:
        return DataChange(found=True, reason=f"{shift}; it is not known whether they have drifted")
    changes = tuple(moves(then, _profile(config, inputs), config.retrain))
    moved = [str(move) for move in changes if move.moved]
    if moved:
        return DataChange(True, f"{shift}, and have drifted: {', '.join(moved)}", changes)
    if config.retrain.when == "drift" and changes:
        return DataChange(
            False, f"nothing new: {shift}, but have not drifted: {_listed(changes)}", changes
        )
    return DataChange(True, f"{shift}; they have not drifted: {_listed(changes)}", changes)


def _profile_tagged(version: Version) -> DataProfile | None:
    """Return the version's data profile, or None if it is missing or in an unknown format."""
    try:
        return DataProfile.model_validate_json(version.tags.get(PROFILE, ""))
    except ValueError:
        return None


def _listed(found: tuple[Move, ...]) -> str:
    return ", ".join(map(str, found)) or "no record of them can be used"


def _profile(config: RunConfig, inputs: Inputs) -> DataProfile:
    """Return the statistics of the data. Fetched files are in the output folder meanwhile."""
    workspace = Workspace.of(config)
    with scratch(workspace.prepared, workspace.run_id) as folder:
        return profile_of(inputs, config.data, folder)


_EMPTY_BIN: Final = 1e-4

Shares = NDArray[np.float64]
Measure = Callable[[Shares, Shares], float]


@dataclass(frozen=True)
class Move:
    """One statistic of the data, then and now.

    value: how far it has moved.
    limit: a larger value counts as moved.
    chance: the distance between the halves of one data set, the larger of the two; infinite if a
        half is empty.
    """

    what: str
    measure: str
    value: float
    limit: float
    chance: float

    @property
    def moved(self) -> bool:
        return self.value > self.limit and self.value > self.chance

    def __str__(self) -> str:
        return f"{self.what} {self.value:.3f} ({self.measure}, limit {self.limit:g})"


def moves(then: DataProfile, now: DataProfile, limits: RetrainConfig) -> list[Move]:
    """Compare every statistic that both data sets have."""
    compared: list[tuple[str, str, Measure, float]] = [
        ("lengths", "population stability index", stability_index, limits.max_length_shift),
        ("labels", "Jensen-Shannon distance", js_distance, limits.max_label_shift),
        ("words", "Jensen-Shannon distance", js_distance, limits.max_word_shift),
    ]
    result = []
    for what, name, measure, limit in compared:
        old, new = (np.array(getattr(profile, what), dtype=float) for profile in (then, now))
        if old.sum() and new.sum():
            value = measure(old.sum(axis=0), new.sum(axis=0))
            chance = max(_between_halves(old, measure), _between_halves(new, measure))
            result.append(Move(what, name, value, limit, chance))
    return result


def stability_index(then: Shares, now: Shares) -> float:
    """Return the population stability index of two histograms over the same bins."""
    p, q = (np.maximum(counts / counts.sum(), _EMPTY_BIN) for counts in (then, now))
    return float(((q - p) * np.log(q / p)).sum())


def js_distance(then: Shares, now: Shares) -> float:
    """Return the Jensen-Shannon distance of two histograms, to base 2: 0 if equal, at most 1."""
    p, q = then / then.sum(), now / now.sum()
    middle = (p + q) / 2
    divergence = (_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2
    return float(np.sqrt(max(divergence, 0.0)))


def _relative_entropy(p: Shares, q: Shares) -> float:
    """Return the relative entropy in bits. Terms with p = 0 are 0."""
    there = p > 0
    return float((p[there] * np.log2(p[there] / q[there])).sum())


def _between_halves(halves: Shares, measure: Measure) -> float:
    """Return the distance between the halves, or infinity if one is empty."""
    return measure(halves[0], halves[1]) if halves.sum(axis=1).all() else float("inf")


def kfp_detect_change(*, page: dsl.HTML, **parameters: Any) -> bool:
    """Run the step.

    It writes nothing to the run's folder, because there may be no run. The report of this pipeline
    run finds its result elsewhere.

    Returns:
        Whether to train again.
    """
    config, job = from_parameters(**parameters), str(parameters["job"])
    workspace = Workspace.of(config)
    try:
        news = run(config)
    except SteadytrainError as error:
        what = {"error": type(error).__name__, "message": redact(error.message)}
        keep_data_check(workspace, job, DataCheck(failure=what | {"remedy": error.remedy}))
        raise
    keep_data_check(workspace, job, DataCheck(found=news.found, reason=news.reason))
    print(news.reason)
    moves = [
        (move.what, [move.measure, f"{move.value:.3f}", f"{move.limit:g}", f"{move.chance:.3f}"])
        for move in news.moves
    ]
    text = html("sentence", kind="data", name=config.name, sentence=news.reason, moves=moves)
    Path(page.path).write_text(text, encoding="utf-8")
    page.metadata.update(
        reason=news.reason, **{f"{move.what}_shift": round(move.value, 4) for move in news.moves}
    )
    return news.found
