"""Check whether the data changed since the current models were trained.

First, compare digests over the input as it is stored. This takes as long as reading local files;
for S3 a listing is enough, and for the Hugging Face Hub the commit. Only if the digests differ,
read every record to measure whether the data have also drifted.
"""

from __future__ import annotations

from dataclasses import dataclass

from steadytrain.components.detect_change.drift import Move, moves
from steadytrain.components.preprocess.inputs import Inputs, find_inputs
from steadytrain.components.preprocess.prepared import scratch
from steadytrain.components.preprocess.profile import profile_of
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataProfile
from steadytrain.components.shared.registry import INPUTS, PROFILE, Registry, Version
from steadytrain.components.shared.workspace import Workspace


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
    inputs = find_inputs(config.data, workspace.output)
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
    found = tuple(moves(then, _profile(config, inputs), config.retrain))
    moved = [str(move) for move in found if move.moved]
    if moved:
        return DataChange(True, f"{shift}, and have drifted: {', '.join(moved)}", found)
    if config.retrain.when == "drift" and found:
        return DataChange(
            False, f"nothing new: {shift}, but have not drifted: {_listed(found)}", found
        )
    return DataChange(True, f"{shift}; they have not drifted: {_listed(found)}", found)


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
