"""Looks whether the data are other ones than those that the models at hand have learned from.

Compared are digests over the input as it is stored, before any of it is read
for training; so the step takes as long as it takes to read local files, and a
listing for those in S3.
"""

from __future__ import annotations

from dataclasses import dataclass

from steadytrain.components.preprocess.inputs import find_inputs
from steadytrain.components.register.versions import INPUTS, Registry
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.workspace import Workspace


@dataclass(frozen=True)
class News:
    """Whether there is something new, and why, in a sentence."""

    found: bool
    reason: str


def look(config: RunConfig) -> News:
    """Compares the input with that of the champion and of the newest candidate.

    The candidate counts too: data that gave a model which the gate refused would
    otherwise be trained on again and again.

    Raises:
        BadInput: an address names nothing that can be read.
        TrackingError: the registry cannot be used.
    """
    digest = find_inputs(config.data).digest()
    registry, aliases = Registry(config, Workspace.of(config)), config.registry
    for alias in (aliases.champion_alias, aliases.candidate_alias):
        version = registry.by_alias(alias)
        if version and version.tags.get(INPUTS) == digest:
            return News(
                found=False,
                reason=f"nothing new: version {version.number} of {registry.name} ({alias}) "
                "has learned from these data",
            )
    champion = registry.by_alias(aliases.champion_alias)
    if champion is None:
        return News(found=True, reason=f"{registry.name} has no champion yet")
    known = INPUTS in champion.tags
    what = "are other ones than" if known else "cannot be compared with"
    return News(
        found=True,
        reason=f"the data {what} those of the champion, version {champion.number} of "
        f"{registry.name}",
    )
