"""Fields of a model's configuration: unknown ones, ones that have no effect, and its splits."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared.errors import BadInput, Problem
from steadytrain.components.shared.foreign import foreign

_TIMMS: Final = re.compile(r"^@register_model\s+def (\w+)", re.MULTILINE)
"""The models in timm's code."""


def unknown_fields(fields: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the fields that a model of this type does not have.

    Transformers silently accepts any field, so a typo would train a different model.
    """
    if fields["model_type"] == "timm_wrapper":
        yield from _unknown_to_timm(fields.get("architecture"))
    if _all_in_the_source(fields):
        return
    # Imported late, because it imports torch.
    from transformers import AutoConfig

    family = fields["model_type"]
    try:
        model = AutoConfig.for_model(family)
    except ValueError:
        yield Problem(
            "model.config.model_type",
            repr(family),
            "Transformers has no such model",
            "for example llama, gpt2, bert",
        )
        return
    known = model.to_dict().keys()
    for name in sorted(fields.keys() - known - model.attribute_map.keys()):
        if name != "attn_implementation":
            yield Problem(
                f"model.config.{name}",
                repr(fields[name]),
                f"a {family} model has no such field",
                f"one of {', '.join(sorted(known))}",
            )


def _unknown_to_timm(name: object) -> Iterator[Problem]:
    """Yield a model that timm does not have."""
    package = importlib.util.find_spec("timm")
    if package is None or package.origin is None:
        return  # As below: where the model is built, it is installed.
    if name is None:
        yield Problem(
            "model.config.architecture",
            "None",
            "it is missing",
            "name one of timm's, such as resnet18",
        )
        return
    # Importing timm takes seconds.
    sources = (path.read_text("utf-8") for path in Path(package.origin).parent.glob("models/*.py"))
    known = {name for text in sources for name in _TIMMS.findall(text)}
    architecture = str(name).partition(".")[0]
    if architecture not in known:
        close = difflib.get_close_matches(architecture, sorted(known), n=3, cutoff=0.5)
        yield Problem(
            "model.config.architecture",
            repr(name),
            "timm has no such model",
            f"did you mean {' or '.join(close)}?" if close else "timm.list_models() lists them",
        )


def refusal(fields: Mapping[str, Any]) -> str:
    """Return why the class of a model's configuration refuses values; "" if it takes them."""
    if importlib.util.find_spec("transformers") is None:
        return ""  # As above.
    from transformers import AutoConfig

    try:
        with foreign("", ""):
            AutoConfig.for_model(**fields)
    except BadInput as error:
        return re.sub(r"^: (?:StrictDataclass\w+: )?", "", error.message)
    return ""


def _all_in_the_source(fields: Mapping[str, Any]) -> bool:
    """Return whether Transformers' code for this model has every field's name as a word.

    No typo does, and reading a file is a hundred times faster than importing it.
    """
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return True  # A machine that submits runs and trains none. Where the model is built, it is.
    root, family = Path(package.origin).parent, str(fields["model_type"]).replace("-", "_")
    names = ["configuration_utils.py", f"models/{family}/configuration_{family}.py"]
    try:
        words = set(re.findall(r"\w+", "".join((root / name).read_text() for name in names)))
    except OSError:
        return False
    return fields.keys() <= words


# Fields of a model's configuration that act only inside Transformers' own loss.
#
# Training computes the loss itself, so such a field would do nothing. The router loss of a mixture
# of experts is added as Transformers adds it. Every other such field is rejected by name. A test
# compares the families below with the code of the installed Transformers.

ROUTER_LOSS: Final = frozenset(
    {
        "dbrx",
        "deepseek_v4",
        "doge",
        "ernie4_5_moe",
        "flex_olmo",
        "flint",
        "gpt_oss",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "jamba",
        "jetmoe",
        "laguna",
        "mellum",
        "minimax",
        "minimax_m2",
        "minimax_m3_vl_text",
        "mixtral",
        "olmoe",
        "phimoe",
        "qwen2_moe",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen4_exp",
        "qwen4_exp_text",
    }
)
"""Families whose causal language model adds the load balance of its experts to its loss."""
Z_LOSS: Final = frozenset({"bamba"})
"""Families whose causal language model adds the squared log-sum-exp of its logits to its loss."""
NGRAM_LOSS: Final = frozenset({"prophetnet"})
"""Families whose causal language model predicts several tokens ahead, in its loss alone."""

_LANGUAGE: Final = ("causal_lm", "supervised_finetuning", "denoising")
_NUMBERS: Final = "sequence_regression"
_CLASSES: Final = {
    "sequence_classification": "single_label_classification",
    "multi_task": "single_label_classification",
    "image_classification": "single_label_classification",
    "multi_label_classification": "multi_label_classification",
}
"""By task with classes: Transformers' name of its kind of problem."""
_LABELS: Final = {
    "single_label_classification": "one label",
    "multi_label_classification": "any number of labels",
}
_PREFERENCES: Final = ("preference", "unpaired_preference")
_OTHERS: Final = (*_PREFERENCES, _NUMBERS, "masked_lm", "text_embedding")
ROUTER_COEFFICIENTS: Final = ("router_aux_loss_coef", "aux_loss_coef")
"""Names of the router loss's coefficient in Transformers' models."""
ROUTER_ON: Final = "output_router_logits"
"""The field that turns the router loss on."""
_AHEAD: Final = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_loss_scaling_factor")
_LEAVE_OUT: Final = "leave it out"


@dataclass(frozen=True)
class Ineffective:
    """A field that would do nothing, with its value, the reason and the fix."""

    name: str
    value: object
    why: str
    remedy: str = _LEAVE_OUT


def ineffective_fields(
    fields: Mapping[str, Any], task: str, *, given: bool
) -> Iterator[Ineffective]:
    """Yield the fields that Transformers' loss would use, and the loss of a built-in task does not.

    A task of another package may use them itself, so it yields none for those.

    Args:
        fields: of Transformers' configuration of the model.
        given: whether the user wrote them. A saved config.json lists defaults too.
    """
    if task not in (*_LANGUAGE, *_CLASSES, *_OTHERS):
        return
    inner = fields.get("text_config")
    fields = {**fields, **(inner if isinstance(inner, Mapping) else {})}
    yield from _router(fields, task, given=given)
    yield from _classes(fields, task, given=given)
    if task in _CLASSES or task not in (*_LANGUAGE, *_PREFERENCES):
        return
    family = fields.get("model_type")
    if family in Z_LOSS and fields.get("z_loss_coefficient"):
        name = "z_loss_coefficient"
        why = f"the loss of data.task {task} has no such part"
        yield Ineffective(name, fields[name], why, "set it to 0")
    if family in NGRAM_LOSS and not (fields.get("disable_ngram_loss") and fields.get("eps") == 0):
        why = "the loss of its family predicts several tokens ahead and smooths the targets"
        remedy = "use another model, or set disable_ngram_loss: true and eps: 0"
        yield Ineffective("model_type", family, why, remedy)
    for name in _AHEAD if given else ():
        if fields.get(name):
            yield Ineffective(name, fields[name], "layers that predict further ahead do not train")


def _router(fields: Mapping[str, Any], task: str, *, given: bool) -> Iterator[Ineffective]:
    family, on = fields.get("model_type"), fields.get(ROUTER_ON)
    known = family in ROUTER_LOSS
    if on and known and task not in _LANGUAGE and (given or task in _PREFERENCES):
        why = f"the loss of data.task {task} does not include the router loss"
        yield Ineffective(ROUTER_ON, on, why, "set it to false")
    for name in ROUTER_COEFFICIENTS if given else ():
        if name not in fields:
            continue
        if not known or task not in _LANGUAGE:
            why = f"a {family} model has no router loss with data.task {task}"
            yield Ineffective(name, fields[name], why)
        elif not on:
            why = f"the router loss counts only with {ROUTER_ON}"
            yield Ineffective(name, fields[name], why, f"set {ROUTER_ON}: true, or leave it out")


def _classes(fields: Mapping[str, Any], task: str, *, given: bool) -> Iterator[Ineffective]:
    kind = fields.get("problem_type")
    problem_type = "regression" if task == _NUMBERS else _CLASSES.get(task)
    if kind not in (None, problem_type) and (given or task in _CLASSES):
        why = (
            f"data.task {task} trains on {_LABELS[problem_type]} of each record"
            if problem_type in _LABELS
            else f"data.task {task} has no classes"
        )
        yield Ineffective("problem_type", kind, why)
    for name in ("id2label", "label2id") if given else ():
        if name in fields:
            yield Ineffective(name, fields[name], "the classes are those of the data")


# The splits that a model was trained on, recorded in its own configuration.
#
# A model that starts from another model has seen everything that model has seen. Each training run
# adds its split to those of the base, so the gate can recognize a model that may have seen the
# records it is evaluated on. Transformers keeps the field wherever the model goes: a folder, a
# bucket, a registry.

FIELD: Final = "steadytrain_splits"
"""In config.json: a list of `DataRecord.split_digest`."""


def splits_of(model: Any) -> list[str]:
    """Return the splits of all training runs behind a model, as recorded in its configuration.

    Raises:
        BadInput: the field has an invalid value.
    """
    result = getattr(getattr(model, "config", None), FIELD, [])
    if not isinstance(result, list) or not all(isinstance(item, str) for item in result):
        raise BadInput(
            f"model.base: {FIELD} in its config.json is {str(result)[:80]!r}, not a list of "
            "digests",
            remedy="restore that field: steadytrain wrote it when it trained the model",
        )
    return result


def add_split(model: Any, split: str) -> None:
    """Record that a model is trained on a split."""
    setattr(model.config, FIELD, sorted({*splits_of(model), split}))
