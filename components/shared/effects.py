"""The base of all sections of the configuration, and what their fields affect.

Digests, reuse, resume, studies and the gate ask for the effects.

A field states its effect in its annotation, such as `Annotated[int, Effect.ROUNDING]`. A field that
states none has the effect of the section that it is in. A `Use` next to it is one more use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, Flag, auto, unique
from types import UnionType
from typing import Annotated, Any, Final, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from steadytrain.components.shared import plugins
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.feature_address import (
    FORM,
    KIND,
    FeatureAddress,
    is_feature_address,
)


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
    MEMORY = auto()
    """The micro-batch that fits in a device's memory."""


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

    def __str__(self) -> str:
        parts = (self.label, self.change, self.note[:1].upper() + self.note[1:])
        return ". ".join(filter(None, parts))


@dataclass(frozen=True)
class IfSet:
    """Marks a field that counts only if it differs from its default, as runs are older than it.

    but: uses whose digests have always contained it.
    """

    but: Use = _NOTHING


@dataclass(frozen=True)
class Adjustable:
    """Marks a field that a person can change while a run trains: the ledger has each change.

    It does not change which rows are learned in which order, and ranks read it at every step.
    """


def effect_stated(field: FieldInfo, section: Effect | None) -> Effect:
    """Return the effect of a field.

    Args:
        section: that of the section that the field is in; None for a section of RunConfig.
    """
    result = next((item for item in field.metadata if isinstance(item, Effect)), section)
    if result is None:
        raise TypeError(f"a section states no effect: {field.description or field.annotation}")
    return result


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
        elif use in effect.uses or use in field.metadata:
            result = plain[name]
            for key, part in value.items() if isinstance(value, dict) else ():
                if isinstance(part, BaseModel):
                    result[key] = dict(_fields(part, result[key], use, effect, unset=True))
            yield name, result


Seconds = Annotated[float, Field(le=1e9)]
"""At most 31 years. The longest wait that the system supports is several hundred years."""


def _plain(content: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(content, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"is not plain JSON: {error}") from None
    return content


PlainJson = Annotated[dict[str, Any], AfterValidator(_plain)]
"""Settings that somebody else defines."""


def complete_address(address: str) -> str:
    """Return an address that names something.

    Raises:
        ValueError: it ends after its kind, as hub: does, or is no table of a feature store.
    """
    kind, separator, rest = address.partition(":")
    if separator and kind in _KINDS and not rest.partition("?")[0].strip("/"):
        raise ValueError(f"names nothing: give {_KINDS[kind]}")
    if is_feature_address(address):
        FeatureAddress.parse(address)
    return address


def is_local(address: str) -> bool:
    """Return whether an address is a path, and not one of the other kinds."""
    return address.partition(":")[0] not in _KINDS


DATA_KINDS: Final[Mapping[str, str]] = {
    KIND: FORM,
    "hub": "hub:NAME",
    "mlflow-dataset": "mlflow-dataset:RUN_ID",
    "package": "package:NAME",
    "s3": "s3://BUCKET/PREFIX",
}
"""The form of each kind of address, other than a path, that `data.source` takes."""
_KINDS: Final = {**DATA_KINDS, "models": "models:/NAME@ALIAS"}
Address = Annotated[str, Field(min_length=1), AfterValidator(complete_address)]
"""Where data are: a path, or one of the kinds of address."""


def _on_disk(folder: str) -> str:
    if "://" in folder or folder.startswith(tuple(f"{kind}:" for kind in _KINDS)):
        raise ValueError("is an address: give a folder; on a cluster, one on a mounted volume")
    if not folder.strip():
        raise ValueError("names nothing: give a folder")
    return folder


Folder = Annotated[str, Field(min_length=1), AfterValidator(_on_disk)]
"""A folder on this machine or, on a cluster, on a mounted volume."""


class Section(BaseModel):
    """A configuration section: immutable, keyword-only, finite numbers, no unknown fields."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values. It computes its cached properties again."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Return the section itself: nothing changes it, and Pydantic copies each default."""
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_truth_value(cls, value: object, info: ValidationInfo) -> object:
        """Reject true and false for a number, which Pydantic would take for 1 and 0."""
        if _misread(value, cls.model_fields[info.field_name or ""].annotation):
            has = "is" if isinstance(value, bool) else "has"
            raise ValueError(f"{has} true or false, and not a number")
        return value


def _misread(value: object, annotation: object) -> bool:
    """Return whether true or false is where only a number may be, also within lists and maps."""
    types = set(types_of(annotation))
    if isinstance(value, bool):
        return bool(types & {int, float}) and bool not in types
    if isinstance(value, Mapping):
        members: Iterable[object] = value.values()
    elif isinstance(value, list | tuple):
        members = value
    else:
        return False
    inner = [
        [item for item in get_args(kind) if item is not Ellipsis][-1]
        for kind in types
        if isinstance(origin := get_origin(kind), type) and issubclass(origin, Collection)
    ]
    return bool(inner) and any(all(_misread(item, one) for one in inner) for item in members)


def types_of(annotation: object) -> Iterator[object]:
    """Yield a type, or the members of a union."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from types_of(member)
    else:
        yield annotation


def check_plugins(group: str, names: Iterable[str], *, otherwise: str = "") -> None:
    """Reject names that no installed package provides in a group of entry points.

    Args:
        otherwise: another fix, to append to the message.

    Raises:
        ValueError: if a name is unknown. The message lists the known names.
    """
    try:
        plugins.check(group, names)
    except BadInput as error:
        raise ValueError(f"{error.message}: {error.remedy}{otherwise}") from None


def check_unread(
    section: Section, address: str, names: Iterable[str], why: str, remedy: str
) -> None:
    """Raise `at_odds` if a field that nothing reads is not at its default.

    Args:
        address: of the section. names: the fields that nothing reads.
        why: what makes them so, such as "with kind none".
        remedy: what would let them be read.
    """
    for name in names:
        value = getattr(section, name)
        if value != type(section).model_fields[name].default:
            message, fix = f"{why}, nothing reads it", f"{remedy}, or leave it out"
            raise at_odds(f"{address}.{name}", value, message, fix)


def at_odds(field: str, value: object, message: str, remedy: str) -> PydanticCustomError:
    """Return the error for a field that is valid by itself but conflicts with another field."""
    context = {"field": field, "value": repr(value), "message": message, "remedy": remedy}
    return PydanticCustomError("at_odds", "{message}", context)


def whole_steps(value: float, steps: int) -> int:
    """Return a number of steps; a value below 1 is a fraction of all `steps`."""
    return int(value) if value >= 1 else math.ceil(steps * value)
