"""How the model is trained.

Fields that Transformers' TrainingArguments also has use the same names and meanings. A test checks
them against the locked version. The batch size is different on purpose: the user sets the global
batch size, which affects what the model learns. steadytrain derives micro-batch size and
accumulation, which only affect what fits in memory.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from steadytrain.components.shared import plugins
from steadytrain.components.shared.effects import (
    Adjustable,
    Effect,
    IfSet,
    PlainJson,
    Section,
    Use,
    at_odds,
    check_plugins,
)
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.techniques.adversarial_training import AdversarialConfig
from steadytrain.components.techniques.averaging import AveragingConfig
from steadytrain.components.techniques.contrastive_texts import BatchContrastiveConfig
from steadytrain.components.techniques.contrastive_tokens import ContrastiveConfig
from steadytrain.components.techniques.curriculum import CurriculumConfig
from steadytrain.components.techniques.distillation import DistillationConfig
from steadytrain.components.techniques.focal_loss import FocalLossConfig
from steadytrain.components.techniques.gradient_compression import CompressionConfig
from steadytrain.components.techniques.hidden_spans import DenoisingConfig
from steadytrain.components.techniques.image_augmentation import ImageAugmentationConfig
from steadytrain.components.techniques.masked_tokens import MaskingConfig
from steadytrain.components.techniques.mixture import MixtureConfig
from steadytrain.components.techniques.mixup import MixupConfig
from steadytrain.components.techniques.multi_task import MultiTaskConfig
from steadytrain.components.techniques.noise_scale import MonitorConfig
from steadytrain.components.techniques.parameter_groups import ParamGroupConfig
from steadytrain.components.techniques.preferences import DpoConfig, KtoConfig
from steadytrain.components.techniques.r_drop import RDropConfig
from steadytrain.components.techniques.rare_classes import ClassWeightsConfig
from steadytrain.components.techniques.settings import ObjectiveConfig, TechniqueConfig
from steadytrain.components.techniques.text_augmentation import AugmentationConfig

_GROUPS: Final = {
    "optim": plugins.OPTIMIZERS,
    "lr_scheduler_type": plugins.SCHEDULES,
    "order": plugins.ORDERS,
}
"""Fields whose values are names that packages register."""
_PROFILED: Final = 100
"""Most steps of a profile: a trace of many more cannot be opened."""


SaveStrategy = Literal["steps", "epoch", "best", "time"]
RateScaling = Literal["none", "linear", "sqrt"]
LabelThresholds = Literal["shared", "per_label", "half"]
ComponentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]


BALANCED: Final = "balanced"
"""The order that draws equally often from every class."""


class ProfileConfig(Section):
    """Profiling of a few steps. It does not change the weights."""

    steps: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = Field(
        None,
        description="First and last optimizer step that torch's profiler records on every rank, "
        "at most 100. Each rank writes a Chrome trace, a summary and, on a GPU, a snapshot of "
        "its memory to the folder profile of the run. None means it records nothing.",
    )

    @field_validator("steps")
    @classmethod
    def _in_order(cls, steps: tuple[int, int] | None) -> tuple[int, int] | None:
        if steps is not None and not 0 <= steps[1] - steps[0] < _PROFILED:
            raise ValueError(f"give the first and the last step, at most {_PROFILED} of them")
        return steps


Attention = Literal["auto", "eager", "sdpa", "flex", "flash_attention_2", "flash_attention_3"]


class TrainingConfig(Section):
    """The training recipe. Steps are optimizer steps, each over one global batch."""

    global_batch_size: int = Field(
        32, ge=1, description="Sequences per optimizer step, over all ranks."
    )
    micro_batch_size: Annotated[int | None, Effect.ROUNDING] = Field(
        None,
        ge=1,
        description="Sequences per forward pass on one rank. None means steadytrain chooses "
        "it to fit in memory.",
    )
    num_train_epochs: Annotated[float, Effect.STEPS] = Field(
        1.0, gt=0, description="Passes over the training data. A positive max_steps overrides it."
    )
    max_steps: Annotated[int, Effect.STEPS] = Field(
        -1,
        ge=-1,
        description="Optimizer steps to train, instead of num_train_epochs. -1 means "
        "num_train_epochs decides.",
    )
    learning_rate: Annotated[float | None, Adjustable()] = Field(
        None,
        gt=0,
        description="Peak learning rate. None means a rule chooses it from the model's size "
        "and adapters.",
    )
    lr_scaling: Annotated[RateScaling, IfSet()] = Field(
        "none",
        description="How the learning rate follows the global batch: `linear` multiplies it by "
        "global_batch_size / base_global_batch_size (usual with SGD), `sqrt` by the square root "
        "of that (usual with Adam), and `none` leaves it. More ranks alone change nothing, because "
        "the global batch stays the same.",
    )
    base_global_batch_size: Annotated[int | None, IfSet()] = Field(
        None,
        ge=1,
        description="The global batch for which the learning rate was chosen. lr_scaling needs it. "
        "None means it is not known.",
    )
    lr_scheduler_type: str = Field(
        "cosine",
        description="Shape of the learning rate schedule after warm-up: linear, cosine, "
        "polynomial, cosine_with_restarts, inverse_sqrt, step_decay, warmup_stable_decay, constant "
        "(without warm-up), constant_with_warmup, reduce_lr_on_plateau (lower whenever validation "
        "stops improving), range_test (grows exponentially from the option lowest), or a name that "
        "an installed package adds. `steadytrain plan` draws it.",
    )
    lr_scheduler_kwargs: Annotated[PlainJson, IfSet()] = Field(
        {},
        description="Options of the schedule, by name: num_cycles of cosine_with_restarts; "
        "timescale of inverse_sqrt; step_size and gamma of step_decay; num_decay_steps, decay_type "
        "and min_lr_ratio of warmup_stable_decay; factor, patience, threshold, cooldown and min_lr "
        "of reduce_lr_on_plateau; lowest of range_test; or what an installed package adds.",
    )
    warmup_steps: Annotated[float, Field(ge=0)] = Field(
        0.05, description="Optimizer steps of warm-up. A value below 1 is a share of all steps."
    )
    weight_decay: Annotated[float, Adjustable()] = Field(
        0.0,
        ge=0,
        description="The optimizer's weight decay. It does not apply to biases and norms.",
    )
    param_groups: Annotated[list[ParamGroupConfig], IfSet(), Use.MEMORY] = Field(
        default=[],
        description="Parameters that are trained in another way: for each entry a pattern `match` "
        "for their names, and `lr_scale` (a factor on the learning rate), `weight_decay`, `frozen` "
        "or `unfreeze_at` (steps, or a share of them, before they are trained). The first entry "
        "that matches a parameter counts, and an entry that matches none is an error.",
    )
    layer_decay: Annotated[float | None, IfSet()] = Field(
        None,
        gt=0,
        lt=1,
        description="Factor on the learning rate from each layer to the one below it. What follows "
        "the layers has the full rate, and embeddings the lowest. None means one rate for all.",
    )
    label_smoothing_factor: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of each training target that is spread over all classes or tokens. "
        "Validation and evaluation use plain targets.",
    )
    label_thresholds: Annotated[LabelThresholds, Effect.EXPORTED, IfSet()] = Field(
        "shared",
        description="Only for multi_label_classification: the probability from which on the "
        "exported model predicts a label. shared: one for all labels, the one with the best "
        "micro_f1 on the validation side. per_label: for each label, the one with its best F1 "
        "there, which is right for macro_f1, or 0.5 if fewer than 10 of the records have the "
        "label. half: 0.5, which is right for hamming_loss. Validation during training uses 0.5.",
    )
    distillation: DistillationConfig = DistillationConfig()
    contrastive: ContrastiveConfig = ContrastiveConfig()
    batch_contrastive: BatchContrastiveConfig = BatchContrastiveConfig()
    r_drop: RDropConfig = RDropConfig()
    focal_loss: FocalLossConfig = FocalLossConfig()
    class_weights: ClassWeightsConfig = ClassWeightsConfig()
    adversarial: AdversarialConfig = AdversarialConfig()
    mixup: MixupConfig = MixupConfig()
    augmentation: AugmentationConfig = AugmentationConfig()
    image_augmentation: ImageAugmentationConfig = ImageAugmentationConfig()
    dpo: Annotated[DpoConfig, Effect.OBJECTIVE] = DpoConfig()
    kto: Annotated[KtoConfig, Effect.OBJECTIVE] = KtoConfig()
    masking: Annotated[MaskingConfig, Effect.OBJECTIVE] = MaskingConfig()
    multi_task: MultiTaskConfig = MultiTaskConfig()
    mixture: MixtureConfig = MixtureConfig()
    denoising: Annotated[DenoisingConfig, Effect.OBJECTIVE] = DenoisingConfig()
    max_grad_norm: Annotated[float, Adjustable()] = Field(
        1.0, ge=0, description="Norm to which gradients are clipped. 0 turns clipping off."
    )
    optim: Annotated[str, Use.MEMORY] = Field(
        "adamw_torch",
        description="Optimizer: adamw_torch, adam, sgd (with momentum), adafactor, lamb, lars, "
        "lion, muon (AdamW for embeddings, head, biases and norms), schedule_free_adamw, "
        "adamw_bnb_8bit, paged_adamw_8bit, or a name that an installed package adds. The 8-bit "
        "ones keep AdamW's moments in a quarter of the memory, and the paged one moves them to "
        "host memory when the GPU runs short, which needs CUDA.",
    )
    optim_args: Annotated[PlainJson, IfSet()] = Field(
        {},
        description="Options of the optimizer, by name: momentum and nesterov of sgd; beta2_decay "
        "and d of adafactor; momentum and trust_coefficient of lars; beta1 and beta2 of lion; "
        "momentum, nesterov and ns_steps of muon; r and weight_lr_power of schedule_free_adamw; or "
        "what an installed package adds.",
    )
    adam_beta1: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="Decay of the first moment of AdamW, and of adam, lamb, schedule_free_adamw "
        "and muon's AdamW. An error with an optimizer that does not read it.",
    )
    adam_beta2: float = Field(
        0.999, ge=0, lt=1, description="Decay of the second moment of the same optimizers."
    )
    adam_epsilon: float = Field(
        1e-8,
        gt=0,
        description="Term added to the denominator of the same optimizers for numerical stability.",
    )
    bf16: Annotated[bool, Use.MEMORY] = Field(
        False, description="Use bfloat16 autocast. Weights stay in float32."
    )
    fp16: Annotated[bool, Use.MEMORY] = Field(
        False, description="Use float16 autocast with a loss scaler. Needs CUDA."
    )
    gradient_checkpointing: Annotated[bool, Effect.ROUNDING, Use.MEMORY] = Field(
        False, description="Recompute activations in the backward pass to save memory."
    )
    torch_compile: Annotated[bool, Effect.ROUNDING, Use.MEMORY] = Field(
        False, description="Fuse the model's kernels with torch.compile."
    )
    attention: Annotated[Attention, Effect.ROUNDING, IfSet(), Use.MEMORY] = Field(
        "auto",
        description="How attention is computed. auto: sdpa where the model has it, else eager; "
        "eager: plain operators; sdpa: PyTorch's fused kernels; flex: PyTorch's compiled kernel; "
        "flash_attention_2 and flash_attention_3: the kernels of the package flash-attn, which "
        "need CUDA and 16 bits. What does not work on the machine is refused. Documents of a "
        "packed row train without padding with auto and sdpa.",
    )
    goal: Annotated[Literal["fastest", "best", "balanced"] | None, Effect.PLANNED, IfSet()] = Field(
        None,
        description="What `plan` and `design` choose for. fastest: the fastest GPU, and LoRA "
        "before all weights; best: all weights wherever they fit, on the cheapest such GPU; "
        "balanced: the least product of hours and USD. None means the cheapest GPU. A run trains "
        "what its configuration says, whatever the goal.",
    )
    prefetch_batches: Annotated[int, Effect.HANDLING, IfSet()] = Field(
        1,
        ge=1,
        le=64,
        description="Global batches that a thread reads ahead while a step computes. More help if "
        "reading is slow now and then. Each takes the memory of a rank's share, on a GPU in its "
        "memory. What is learned stays the same.",
    )
    loader_workers: Annotated[int, Effect.HANDLING, IfSet()] = Field(
        1,
        ge=1,
        le=64,
        description="Threads of each rank that read and change the rows of a global batch. More "
        "help where training waits for changes of images, which leave Python's lock free. What is "
        "learned stays the same.",
    )
    seed: Annotated[int, Effect.SEED] = Field(
        42, ge=0, description="Seed for new weights, dropout and the order of samples."
    )
    order: str = Field(
        "seeded",
        description="Which rows make up each global batch. seeded: a new permutation in each "
        "epoch; balanced: the same with equal shares of every class; or a name that an installed "
        "package adds.",
    )
    order_options: Annotated[PlainJson, IfSet()] = Field(
        {},
        description="Options of an order that an installed package adds, by name. seeded and "
        "balanced have none.",
    )
    curriculum: CurriculumConfig = CurriculumConfig()
    # A checkpoint's file names contain these names.
    components: dict[ComponentName, dict[str, Any]] = Field(
        default={},
        description="Training components that installed packages add, such as averaging or "
        "monitors: the options of each by its name.",
    )
    averaging: AveragingConfig = AveragingConfig()
    gradient_compression: CompressionConfig = CompressionConfig()
    monitor: Annotated[MonitorConfig, Effect.WATCHED] = MonitorConfig()
    profile: Annotated[ProfileConfig, Effect.WATCHED] = ProfileConfig()
    full_determinism: Annotated[bool, Effect.EXPORTED] = Field(
        False, description="Use deterministic kernels only, which is slower."
    )
    logging_steps: Annotated[int, Effect.HANDLING, Adjustable()] = Field(
        10, ge=1, description="Optimizer steps between reports of the loss."
    )
    eval_steps: Annotated[int, Effect.VALIDATION, Adjustable()] = Field(
        100, ge=1, description="Optimizer steps between validations."
    )
    save_steps: Annotated[int | None, Effect.HANDLING, Adjustable()] = Field(
        None,
        ge=1,
        description="Optimizer steps between checkpoints. None means the interval follows from "
        "what a checkpoint costs and the time between failures.",
    )
    save_strategy: Annotated[SaveStrategy | None, Effect.HANDLING, IfSet()] = Field(
        None,
        description="When to save checkpoints. `steps`: every save_steps. `time`: at an interval "
        "that follows from what a checkpoint costs and the time between failures. `epoch`: at the "
        "end of each epoch, and as with time within a longer one. `best`: only when a validation "
        "is the best so far. All but best also save the best model, with load_best_model_at_end, "
        "and the last step; a run that is stopped always saves. None means steps if save_steps is "
        "set, else time; below 100,000 examples, also the end of an epoch if that is worth it.",
    )
    save_total_limit: Annotated[int, Effect.HANDLING] = Field(
        2, ge=1, description="Number of newest checkpoints to keep. The best one is kept as well."
    )
    save_keep_every: Annotated[int | None, Effect.HANDLING] = Field(
        None,
        ge=1,
        description="Keep every checkpoint whose step is a multiple of this number. None "
        "means only save_total_limit decides.",
    )
    metric_for_best_model: Annotated[str | None, Effect.EXPORTED] = Field(
        None,
        description="Validation metric that picks the best model. None means the task's own "
        "validation score.",
    )
    greater_is_better: Annotated[bool | None, Effect.EXPORTED] = Field(
        None,
        description="Whether a higher value of that metric is better. None means that the metric "
        "decides. Needed only for a metric that another package adds.",
    )
    load_best_model_at_end: Annotated[bool, Effect.EXPORTED] = Field(
        True, description="Export the best validated model instead of the last one."
    )
    early_stopping_patience: Annotated[int | None, Effect.EXPORTED, Adjustable()] = Field(
        None,
        ge=1,
        description="Validations without a better score before training stops early. None "
        "means it never does.",
    )
    early_stopping_threshold: Annotated[float, Effect.EXPORTED, Adjustable()] = Field(
        0.0,
        ge=0,
        description="Only an improvement of the score by more than this resets early "
        "stopping's patience.",
    )

    @cached_property
    def weight_copies(self) -> int:
        """Number of tensors besides the optimizer's for each trained weight, of its size."""
        created = (plugins.create(plugins.COMPONENTS, *item) for item in self.components.items())
        copies: int = sum(component.weight_copies for component in created)
        return copies + sum(section.weight_copies for section in self.techniques)

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """The precision of forward and backward passes."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @property
    def exporting_components(self) -> list[str]:
        """The components whose tensors replace the exported weights."""
        return [
            name
            for name, options in self.components.items()
            if plugins.create(plugins.COMPONENTS, name, options).exports
        ]

    @property
    def micro_batch(self) -> int | None:
        """The configured micro-batch; None if it is derived."""
        return self.batch_contrastive.rows or self.micro_batch_size

    @property
    def rate_scale(self) -> float:
        """The factor on the learning rate by `lr_scaling`."""
        if self.lr_scaling == "none" or self.base_global_batch_size is None:
            return 1.0
        larger = self.global_batch_size / self.base_global_batch_size
        return larger if self.lr_scaling == "linear" else math.sqrt(larger)

    @property
    def objectives(self) -> list[str]:
        """The objectives that are used, by their field."""
        return [name for name in self.all_objectives() if getattr(self, name).on]

    @classmethod
    def all_objectives(cls) -> list[str]:
        """Return the fields of all objectives."""
        types = {name: field.annotation for name, field in cls.model_fields.items()}
        return [
            name
            for name, kind in types.items()
            if isinstance(kind, type) and issubclass(kind, ObjectiveConfig)
        ]

    @property
    def techniques(self) -> list[TechniqueConfig]:
        """The sections that turn techniques on."""
        return [section for _, section in self if isinstance(section, TechniqueConfig)]

    @field_validator(*_GROUPS)
    @classmethod
    def _registered(cls, name: str, info: ValidationInfo) -> str:
        # Skip the default: listing all installed packages takes 50 ms.
        field = str(info.field_name)
        if name != cls.model_fields[field].default:
            check_plugins(_GROUPS[field], [name])
        return name

    @field_validator("max_steps")
    @classmethod
    def _some_steps(cls, value: int) -> int:
        if value == 0:
            raise ValueError("give a positive number, or -1 to train by epochs")
        return value

    @field_validator("components")
    @classmethod
    def _known_components(cls, components: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if components:
            check_plugins(plugins.COMPONENTS, components)
        exporting = []
        for name, options in components.items():
            try:
                component = plugins.create(plugins.COMPONENTS, name, options)
            except BadInput as error:
                raise at_odds(
                    f"training.components.{name}", options, error.message, error.remedy
                ) from None
            exporting += [name] if component.exports else []
        if len(exporting) > 1:
            raise ValueError(
                f"{' and '.join(exporting)} all replace the exported weights; configure one of them"
            )
        return components

    @model_validator(mode="after")
    def _seeded_has_no_options(self) -> TrainingConfig:
        if self.order_options and self.order == type(self).model_fields["order"].default:
            raise at_odds(
                "training.order_options",
                self.order_options,
                f"training.order {self.order} has no options",
                "leave them out, or set training.order to an order that takes them",
            )
        return self

    @property
    def saves(self) -> SaveStrategy:
        """When checkpoints are saved."""
        return self.save_strategy or ("time" if self.save_steps is None else "steps")

    @model_validator(mode="after")
    def _saves_as_it_says(self) -> TrainingConfig:
        field, strategy = "training.save_strategy", self.save_strategy
        if strategy == "steps" and self.save_steps is None:
            raise at_odds(field, strategy, "training.save_steps is not set", "set it")
        if strategy not in (None, "steps") and self.save_steps is not None:
            raise at_odds(
                "training.save_steps",
                self.save_steps,
                f"{field} is {strategy}, so nothing reads it",
                f"leave it out, or set {field} to steps",
            )
        if strategy == "best" and not self.load_best_model_at_end:
            raise at_odds(
                field,
                strategy,
                "training.load_best_model_at_end is off, so the last model is exported",
                "turn that on, or use another strategy",
            )
        return self

    @model_validator(mode="after")
    def _scales_from_a_batch(self) -> TrainingConfig:
        if self.lr_scaling != "none" and self.base_global_batch_size is None:
            raise at_odds(
                "training.lr_scaling",
                self.lr_scaling,
                "training.base_global_batch_size is not set",
                "set it to the global batch for which the learning rate was chosen",
            )
        return self

    @model_validator(mode="after")
    def _unfreezes_before_the_end(self) -> TrainingConfig:
        for index, group in enumerate(self.param_groups):
            start = group.unfreeze_at
            if start is not None and start >= self.max_steps > 0:
                raise at_odds(
                    f"training.param_groups.{index}.unfreeze_at",
                    start,
                    f"training.max_steps is {self.max_steps}, so they would never be trained",
                    "use fewer steps, a share of all steps below 1, or frozen",
                )
        return self

    def never_stops_early(self, steps: int) -> bool:
        """Return whether training ends before the patience can: the first score is the best."""
        patience = self.early_stopping_patience
        return patience is not None and (patience + 1) * self.eval_steps >= steps

    @model_validator(mode="after")
    def _techniques_fit(self) -> TrainingConfig:
        for section in self.techniques:
            section.check(self)
        return self
