"""What the fields of the configuration affect: digests, reuse, resume, studies and the gate ask.

A field states its effect in its annotation, such as `Annotated[int, Effect.ROUNDING]`. A field that
states none has the effect of the section that it is in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, Flag, auto, unique
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo


class Use(Flag):
    """What is reused, or continues, only if the fields that count for it are the same."""

    RUN = auto()
    """A run without a name of its own."""
    DATA = auto()
    """Prepared data. Of their sources, the content counts."""
    TRAINING = auto()
    """A trained model."""
    RESUME = auto()
    """A run that was interrupted. Of the data, the fingerprint counts."""
    SCORES = auto()
    """An evaluation."""
    GATE = auto()
    """The gate's decision."""
    STUDY = auto()
    """A study, an ablation or a cross-validation."""


_NOTHING = Use(0)
_TRAINING = Use.RUN | Use.TRAINING
_LEARNED = _TRAINING | Use.RESUME
_DATA = _TRAINING | Use.SCORES | Use.GATE
_UNCHANGED: Final = "it does not change what a trial learns"
_INCOMPARABLE: Final = "the scores of the trials could not be compared"
_SAME_STEPS: Final = "every trial has the same steps, so that they can be compared at each rung"
_LUCK: Final = (
    "a lucky seed is not a better setting, and the winner is trained on tune.seeds fresh seeds"
)
_KEPT: Final = "A run cannot continue with another value"
_FREE: Final = "A run may continue with another value"
_REDECIDED: Final = "The gate decides again; training is reused"


@unique
class Effect(Enum):
    """What a field affects.

    label: what it affects, in few words.
    uses: what it counts for.
    change: what happens to what exists if the field changes; "" if nothing does.
    fixed: why a study cannot vary it; "" if it can.
    note: what a run that continues with another value must report; "" if nothing.
    """

    FORMAT = "how the file is read", Use.RUN
    NAMES = "names of runs and models", Use.RUN
    PLACE = "where files are written", _NOTHING, "A run continues only in its own folder"
    SOURCE = "prepared data", _DATA, "The content counts", _INCOMPARABLE
    DATA = "prepared data", _DATA | Use.DATA, _KEPT, _INCOMPARABLE
    ROWS = "prepared data, what is learned", _DATA | Use.DATA, _KEPT, ""
    ENCODING = "prepared data, what is learned", _LEARNED | Use.DATA, _KEPT, ""
    LEARNED = "what is learned", _LEARNED, _KEPT, ""
    RATE = (
        "what is learned",
        _LEARNED,
        "`steadytrain adjust` changes it while a run trains. " + _KEPT,
        "",
    )
    OBJECTIVE = "what is learned, scores", _LEARNED | Use.SCORES, _KEPT, ""
    SEED = "what is learned, scores", _LEARNED | Use.SCORES | Use.GATE, _KEPT, _LUCK
    TOKENS = "what is learned, unit of the loss", _LEARNED, _KEPT, _INCOMPARABLE
    STEPS = "how long it learns", _LEARNED, _KEPT, _SAME_STEPS
    EXPORTED = "exported model", _LEARNED, _KEPT
    VALIDATION = (
        "when it is validated",
        _TRAINING,
        _FREE,
        _SAME_STEPS,
        "it is validated at other steps, so it may select other weights, stop at another step and "
        "lower the learning rate at another step",
    )
    DIVERGENCE = (
        "which steps diverge",
        _TRAINING,
        _FREE,
        _UNCHANGED,
        "other steps may count as diverged, and their batches are skipped",
    )
    ROUNDING = (
        "rounding",
        _TRAINING,
        _FREE,
        _UNCHANGED,
        "sums are computed in another order, so the weights agree, but not bit for bit",
    )
    HANDLING = "how training is done", _TRAINING, _FREE
    WATCHED = "how a run is watched", _NOTHING, _FREE
    PLANNED = "what a plan chooses", _NOTHING, _FREE
    COST = "cost shown", _NOTHING, _FREE
    PODS = "pods that train", _NOTHING, _FREE
    RECOVERY = "response to failures", Use.RUN, _FREE
    WAITING = "waits for servers", _NOTHING, _FREE
    SCORES = (
        "scores",
        Use.RUN | Use.SCORES | Use.GATE,
        "They are computed again; training is reused",
    )
    GATE = "verdict on the model", Use.RUN | Use.GATE, _REDECIDED
    SEARCHED = "confidence of the verdict", Use.GATE, _REDECIDED
    TRACKING = "where the run is recorded", Use.RUN
    PIPELINE = "shape of the pipeline", _NOTHING
    RETRAINING = "when retrain trains", _NOTHING
    FOLD = "what is held out", Use.RUN, _KEPT, _INCOMPARABLE
    FOLDS = "what is held out", Use.RUN | Use.DATA | Use.STUDY, _KEPT, _INCOMPARABLE
    STUDY = "studies", Use.STUDY, "A study cannot continue with another value"
    STUDY_LIMIT = "studies", _NOTHING, "A study may continue with another value"

    def __init__(
        self, label: str, uses: Use, change: str = "", fixed: str = _UNCHANGED, note: str = ""
    ) -> None:
        self.label = label
        self.uses = uses
        self.change = change
        self.fixed = fixed
        self.note = note

    @property
    def adjustable(self) -> bool:
        """Whether a person can change the field while a run trains: the ledger has each change."""
        return self is Effect.RATE

    def __str__(self) -> str:
        parts = (self.label, self.change, self.note[:1].upper() + self.note[1:])
        return ". ".join(filter(None, parts))


@dataclass(frozen=True)
class IfSet:
    """Marks a field that counts only if it differs from its default, as runs are older than it.

    but: uses whose digests have always contained it.
    """

    but: Use = _NOTHING


def effect_stated(field: FieldInfo, section: Effect | None) -> Effect:
    """Return the effect of a field.

    Args:
        section: that of the section that the field is in; None for a section of RunConfig.
    """
    found = next((item for item in field.metadata if isinstance(item, Effect)), section)
    if found is None:
        raise TypeError(f"a section states no effect: {field.description or field.annotation}")
    return found


def counted(config: BaseModel, use: Use) -> dict[str, Any]:
    """Return the fields that count for a use, as plain data. What is turned off does not count."""
    return dict(_fields(config, config.model_dump(mode="json"), use, None, unset=False))


def _fields(
    section: BaseModel, plain: dict[str, Any], use: Use, default: Effect | None, *, unset: bool
) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a section that count for a use.

    Args:
        plain: the section as plain data.
        default: the effect of fields that state none.
        unset: whether fields that are not set always count, as in the parts of the data.
    """
    for name, field in type(section).model_fields.items():
        value, effect = getattr(section, name), effect_stated(field, default)
        mark = next((item for item in field.metadata if isinstance(item, IfSet)), None)
        if mark and not unset and use not in mark.but and value == field.get_default():
            continue
        if isinstance(value, BaseModel):
            inner = dict(_fields(value, plain[name], use, effect, unset=unset))
            if inner and getattr(value, "on", True):
                yield name, inner
        elif use in effect.uses:
            found = plain[name]
            for key, part in value.items() if isinstance(value, dict) else ():
                if isinstance(part, BaseModel):
                    found[key] = dict(_fields(part, found[key], use, effect, unset=True))
            yield name, found
