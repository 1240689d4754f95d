"""A run as Transformers' Trainer does it: training_args.json and train_with_transformers.py.

The script reads the prepared data of the run, begins with the same weights, and sees the same rows
in the same order. The script's header names each setting that Trainer does not have. If the losses
would differ, there is no script, and training_args.json gives the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

from pydantic import BaseModel

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data_sections import MULTI_LABEL
from steadytrain.components.shared.config.fields import Decision, describe, differs
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.techniques.dropout import FAMILIES, dropout_fields
from steadytrain.components.train.one_file import one_file
from steadytrain.components.train.recovery.history import History

ARGUMENTS: Final = "training_args.json"
SCRIPT: Final = "train_with_transformers.py"
_KINDS: Final = {
    **dict.fromkeys(("causal_lm", "supervised_finetuning"), "Documents"),
    "masked_lm": "Masked",
    "sequence_classification": "Classes",
    MULTI_LABEL: "LabelSets",
    "sequence_regression": "Numbers",
    "denoising": "Spans",
    "preference": "Pairs",
    "unpaired_preference": "Answers",
    "text_embedding": "Embeddings",
    "image_classification": "Images",
}
"""The kind of rows by task, a subclass of `with_transformers.common.Kind`."""
_OBJECTIVES: Final = {
    "masked_lm": "masking",
    "denoising": "denoising",
    "preference": "dpo",
    "unpaired_preference": "kto",
    "text_embedding": "batch_contrastive",
    "image_classification": "image_augmentation",
}
"""The section of `training` that a script reads, by task."""
_LABELS: Final = {
    **dict.fromkeys(("preference", "unpaired_preference"), "targets"),
    "text_embedding": "texts",
}
"""What a loss of the script's own reads, by task."""
_NO_SCRIPT: Final = {
    "multi_task": "Trainer has no model with several heads",
    "multimodal_classification": "Trainer has no model of texts, images and columns",
}
_FIELDS: Final = (
    *("max_steps", "num_train_epochs", "learning_rate", "lr_scheduler_type", "warmup_steps"),
    *("weight_decay", "max_grad_norm", "label_smoothing_factor", "optim"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "fp16", "gradient_checkpointing"),
    *("torch_compile", "seed", "full_determinism", "logging_steps", "eval_steps"),
    *("save_total_limit", "load_best_model_at_end"),
)
"""Fields that TrainingArguments has too, by the same name and with the same meaning."""
_SCHEDULES: Final = (
    *("linear", "cosine", "polynomial", "cosine_with_restarts", "inverse_sqrt"),
    *("constant", "constant_with_warmup"),
)
_OPTIMIZERS: Final = ("adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit")
_SCORES: Final = {"loss": False, "accuracy": True, "macro_f1": True}
"""Metrics that the script computes, and whether a higher value is better."""
_SCORED: Final = ("Classes", "Images")
"""Kinds of rows whose accuracy and F1 the script computes."""
_PACKAGE: Final = f"{__name__.rpartition('.')[0]}.with_transformers"
_MODULES: Final = {
    **dict.fromkeys(("Documents", "Masked", "Spans"), f"{_PACKAGE}.documents"),
    **dict.fromkeys(("Classes", "LabelSets", "Numbers"), f"{_PACKAGE}.texts"),
    **dict.fromkeys(("Pairs", "Answers"), f"{_PACKAGE}.preferences"),
    "Embeddings": f"{_PACKAGE}.embeddings",
    "Images": "steadytrain.components.images.with_transformers",
}
_BAD_INPUT: Final = '''class BadInput(SystemExit):
    """The input cannot be used."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(with_fix(message, remedy))'''


@dataclass(frozen=True)
class TransformersRun:
    """The content of the two files.

    arguments: of TrainingArguments, by name, each with the reason for its value.
    kind: of the rows; "" if there is none.
    refused: why Trainer cannot do the same; then there is no script.
    remarks: what differs with Trainer although the losses are those of the run.
    classes: sources that replace classes of this package, by name.
    """

    kind: str
    arguments: dict[str, tuple[Any, str]]
    run: dict[str, Any]
    refused: list[str]
    remarks: list[str]
    classes: dict[str, str]

    @classmethod
    def of(
        cls,
        config: RunConfig,
        decisions: Sequence[Decision],
        batch: BatchSettings,
        steps: int,
        changes: Sequence[str] = (),
    ) -> TransformersRun:
        """Return the files' content.

        Args:
            decisions: with their reasons; a field that has none is taken from the configuration.
            batch: how a rank trains.
            steps: micro-batches that a rank accumulates for an optimizer step.
            changes: what changed while the run trained, a sentence each.
        """
        arguments = dict(_arguments(config, decisions, batch, steps))
        training, data, adapter = config.training, config.data, config.model.adapter
        objective = _OBJECTIVES.get(data.task)
        run = {
            "data": str(Workspace.of(config).record("preprocess")),
            "prepare": "steadytrain step preprocess steadytrain.yaml",
            "global_batch_size": training.global_batch_size,
            "base": config.model.base,
            "revision": config.model.revision,
            "config": dict(config.model.config),
            "adapter": _adapter(config),
            "quantization": adapter.quantization if adapter.kind == "qlora" else None,
            "dropout": _dropout(config),
            "patience": training.early_stopping_patience,
            "threshold": training.early_stopping_threshold,
            "label": data.columns.label,
            "objective": objective and getattr(training, objective).model_dump(),
        }
        refused = list(_refused(config))
        remarks = [] if refused else list(_remarks(config, batch))
        kind = _KINDS.get(data.task, "")
        classes = {"BadInput": _BAD_INPUT}
        for section, more in ((data.images, "channels"), (training.image_augmentation, "on")):
            classes[type(section).__name__] = _constants(section, more)
        return cls(kind, arguments, run, refused, [*changes, *remarks], classes)

    def texts(self) -> dict[str, str]:
        """Return the content of each file by its name."""
        content = {
            "arguments": {name: value for name, (value, _) in self.arguments.items()},
            "reasons": {name: reason for name, (_, reason) in self.arguments.items()},
            "script": None if self.refused else SCRIPT,
            "refused": self.refused,
            "remarks": self.remarks,
        }
        files = {ARGUMENTS: json.dumps(content, indent=2) + "\n"}
        return files if self.refused else {**files, SCRIPT: self._script()}

    def _script(self) -> str:
        run = ["RUN: dict[str, Any] = {"]
        run += [f"    {name!r}: {value!r}," for name, value in self.run.items()]
        given = ["ARGUMENTS: dict[str, Any] = {"]
        for name, (value, reason) in self.arguments.items():
            given += [f"    # {reason}", f"    {name!r}: {value!r},"]
        values = {"RUN": "\n".join((*run, "}")), "ARGUMENTS": "\n".join((*given, "}"))}
        names = {"train": f"{_PACKAGE}.common", self.kind: _MODULES[self.kind]}
        return one_file(f"train({self.kind})", names, self._header(), self.classes | values)

    def _header(self) -> str:
        packages = ["torch", "transformers", "accelerate", "pyarrow"]
        quantized = self.run["quantization"] or "8bit" in self.arguments["optim"][0]
        needs = {
            "peft": self.run["adapter"],
            "bitsandbytes": quantized,
            "pillow": self.kind == "Images",
            "timm": self.run["config"].get("model_type") == "timm_wrapper",
        }
        packages += [name for name, needed in needs.items() if needed]
        lines = [
            "Train as the steadytrain run does, with Transformers' Trainer.",
            "",
            "python train_with_transformers.py; for several ranks, torchrun or accelerate launch.",
            f"Needs {', '.join(packages)}, and the data of the run.",
            "",
            "What is different from the run:",
            *(f"- {remark}" for remark in self.remarks),
        ]
        return "\n".join(lines)


def _arguments(
    config: RunConfig, decisions: Sequence[Decision], batch: BatchSettings, steps: int
) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield each argument of TrainingArguments with its value and the reason for it."""
    decided = {item.field: item for item in decisions if item.value is not None}
    for name in _FIELDS:
        field = f"training.{name}"
        given = decided.get(field)
        value = getattr(config.training, name) if given is None else given.value
        if name == "gradient_checkpointing":
            value = batch.gradient_checkpointing
        yield name, (value, _reason(config, field) if given is None else given.reason)
    split = decided.get("training.micro_batch_size")
    why = "steadytrain chose it for the memory of the device" if split is None else split.reason
    yield "per_device_train_batch_size", (batch.micro_batch_size, why)
    yield "per_device_eval_batch_size", (batch.micro_batch_size, "as in training")
    yield (
        "gradient_accumulation_steps",
        (steps, f"makes a global batch of {config.training.global_batch_size}"),
    )
    if config.training.lr_scheduler_kwargs:
        value = dict(config.training.lr_scheduler_kwargs)
        yield "lr_scheduler_kwargs", (value, _reason(config, "training.lr_scheduler_kwargs"))
    yield "eval_strategy", ("steps", "steadytrain validates every eval_steps")
    yield (
        "save_strategy",
        ("steps", "Trainer can only return to the best model if it saves where it validates"),
    )
    yield "save_steps", (config.training.eval_steps, "as eval_steps")
    metric = _metric(config)
    yield "metric_for_best_model", (metric, _reason(config, "training.metric_for_best_model"))
    yield "greater_is_better", (_SCORES.get(metric, False), "follows from the metric")
    if batch.gradient_checkpointing:
        reentrant = {"use_reentrant": False}
        yield "gradient_checkpointing_kwargs", (reentrant, "as steadytrain recomputes")
    if labels := _LABELS.get(config.data.task):
        yield "label_names", ([labels], "with them, Trainer computes the loss of a validation")
    yield "train_sampling_strategy", ("sequential", "the script has the order of the rows")
    yield "remove_unused_columns", (False, "the collator reads all columns")
    yield "logging_nan_inf_filter", (False, "Trainer's default hides losses that are not finite")
    yield "use_cpu", (config.compute.device == "cpu", _reason(config, "compute.device"))
    yield "report_to", ("none", "add mlflow or wandb if you use them")


def _metric(config: RunConfig) -> str:
    return config.training.metric_for_best_model or "loss"


def _reason(config: RunConfig, field: str) -> str:
    """Return why a field without a decision has its value, in one line."""
    if differs(config, field):
        return "set by you"
    first = describe(field).description.partition(". ")[0].partition(": ")[0].rstrip(".")
    value = reduce(getattr, field.split("."), config)
    return f"the default, {value}: {first[:1].lower()}{first[1:]}"


def _constants(section: BaseModel, *properties: str) -> str:
    """Return the source of a class with the fields of a section, and properties, as constants."""
    values = section.model_dump() | {name: getattr(section, name) for name in properties}
    lines = [f"    {name} = {value!r}" for name, value in values.items()]
    return "\n".join((f"class {type(section).__name__}:", *lines))


def _adapter(config: RunConfig) -> dict[str, Any] | None:
    adapter = config.model.adapter
    if adapter.kind == "none":
        return None
    return {
        "r": adapter.rank,
        "lora_alpha": adapter.scale,
        "lora_dropout": adapter.dropout,
        "target_modules": adapter.targets or None,
    }


def _dropout(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the fields that set the dropout, by the model's family."""
    dropout = config.model.dropout
    return {
        family: dropout_fields(dropout, family)
        for family, names in FAMILIES.items()
        if dropout.places and names.keys() >= dropout.places.keys()
    }


def _refused(config: RunConfig) -> Iterator[str]:
    """Yield each setting with which Trainer would learn something else."""
    training, model, task = config.training, config.model, config.data.task
    if not config.model.has_default_framework:
        yield f"model.framework {model.framework}: Trainer trains PyTorch models of Transformers"
        return
    if task not in _KINDS:
        yield f"data.task {task}: {_NO_SCRIPT.get(task, 'the script does not know its rows')}"
    for field, value, known in (
        ("training.optim", training.optim, _OPTIMIZERS),
        ("training.lr_scheduler_type", training.lr_scheduler_type, _SCHEDULES),
        ("training.order", training.order, ("seeded",)),
        (
            "training.metric_for_best_model",
            _metric(config),
            tuple(_SCORES) if _KINDS.get(task) in _SCORED else ("loss",),
        ),
        ("model.adapter.frozen_head", model.adapter.frozen_head, ("as_loaded",)),
    ):
        if value not in known:
            yield f"{field} {value}: the script can do {', '.join(known)}"
    yield from _lacking(config)
    if model.adapter.kind != "none" and task == "masked_lm":
        yield f"model.adapter.kind {model.adapter.kind}: the script has no adapters for {task}"
    if str(model.base or "").startswith(("s3:", "models:")):
        yield f"model.base {model.base}: download it, and give its folder"


def _lacking(config: RunConfig) -> Iterator[str]:
    """Yield each setting that is in use and that Trainer, or the script, does not have."""
    training, techniques = config.training, config.training.techniques
    used = [
        name
        for name, section in training
        if section in techniques and section.on and name != _OBJECTIVES.get(config.data.task)
    ]
    used += [
        name for name in ("components", "param_groups", "layer_decay") if getattr(training, name)
    ]
    yield from (f"training.{name}: Trainer does not have it" for name in used)
    model = [name for name in ("added_tokens", "trust_remote_code") if getattr(config.model, name)]
    yield from (f"model.{name}: the script does not build such a model" for name in model)


def _remarks(config: RunConfig, batch: BatchSettings) -> Iterator[str]:
    """Yield what is different, although the losses of steps are those of the run."""
    training = config.training
    yield "Dropout draws other random numbers, so with dropout the losses agree only on average."
    yield (
        "Nothing recovers: no retries, no smaller micro-batch when memory runs out, no step back "
        "after a divergence, no checksums of checkpoints."
    )
    yield (
        "With several ranks, Trainer fills the last batches of a validation with rows of the "
        "first, so validation losses differ."
    )
    saves = training.save_strategy or ("steps" if training.save_steps else "time")
    yield f"It saves at each validation; the run saves by training.save_strategy {saves}."
    if training.lr_scaling != "none":
        yield f"training.lr_scaling {training.lr_scaling} is part of the learning rate already."
    yield from _remarks_of_kind(config)
    if config.model.adapter.kind != "none":
        kept = "as in the run" if config.model.adapter.kind == "qlora" else "in float32"
        yield f"Adapters begin with those of the run on a CPU; frozen weights are {kept}."
    if training.torch_compile:
        yield "torch_compile compiles the whole model, not layer by layer."
    strategy = batch.strategy
    if strategy not in ("", "single", "ddp") or batch.offload != "none":
        yield (
            f"compute.strategy {strategy}, compute.offload {batch.offload}: use `accelerate "
            "launch --config_file accelerate.yaml`, which `steadytrain plan --write` writes."
        )
    if training.profile.steps is not None:
        yield "training.profile: nothing is profiled."
    if config.training.attention != "auto":
        yield "training.attention: Transformers chooses the attention."
    if config.training.monitor != type(config.training.monitor)():
        yield "training.monitor: nothing is measured."


def _remarks_of_kind(config: RunConfig) -> Iterator[str]:
    """Yield what is different only with such rows."""
    kind = _KINDS[config.data.task]
    if kind == "Documents":
        yield "Documents of a packed row become padded rows of their own, which is slower."
    if kind in ("Documents", "Masked", "Spans"):
        yield "The validation loss is the mean over batches, not over tokens."
    if kind == "Images":
        yield "No preprocessor_config.json is written: prepare images as steadytrain does."
        yield (
            "Batch normalization, if the model has it, is over the micro-batch of each rank, and "
            "in the run over those of all ranks. With few images, it lets differences by rounding "
            "grow until losses differ."
        )
    if kind in ("Classes", "LabelSets", "Images") and config.model.base:
        yield (
            "If the base model has a head for the same classes in another order, the run reorders "
            "its rows, and for some of the classes it makes a new head; the script does neither."
        )
    if kind == "LabelSets" and config.training.label_thresholds != "half":
        yield "training.label_thresholds: the script fits no thresholds."


def without_trainer(config: RunConfig) -> TransformersRun:
    """Return the content of training_args.json that says why Trainer has no arguments for a run."""
    return TransformersRun("", {}, {}, list(_refused(config)), [], {})


def of_run(config: RunConfig, history: History) -> TransformersRun | None:
    """Return the files' content for a run; None before its first attempt is ready to train."""
    if not config.model.has_default_framework:
        return without_trainer(config)
    if not history.recipe:
        return None
    started = history.attempts[-1].started
    split = [Decision(**item) for item in started.decisions]
    changes = [f"The run changed {item.change}; the script does not." for item in history.adjusted]
    if history.skipped_batches:
        skipped = ", ".join(map(str, history.skipped_batches))
        changes.append(f"The run skipped the global batches {skipped}; the script does not.")
    if history.learning_rate_scale != 1:
        scale = history.learning_rate_scale
        changes.append(f"The run lowered its rates by {scale:g} on the way; the script does not.")
    if shortened := history.shortened:
        changes.append(f"The run had {shortened.reason}; the script has full sequences.")
    return TransformersRun.of(
        config,
        [*history.recipe, *split],
        started.batch,
        started.gradient_accumulation_steps,
        changes,
    )
