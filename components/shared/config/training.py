"""How the model is trained.

Fields that Transformers' TrainingArguments also has carry its names and its
meaning; a test holds them to the locked version. The batch is the exception on
purpose: the user states the global batch, which decides what is learned, and
the product derives micro-batch and accumulation, which decide only what fits.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from steadytrain.components.shared.config.base import Seconds, Section, at_odds

Scheduler = Literal["linear", "cosine", "polynomial", "constant", "constant_with_warmup"]


class TrainingConfig(Section):
    """The recipe. Steps are optimizer steps, each over one global batch."""

    global_batch_size: int = Field(32, ge=1, description="sequences an optimizer step, all ranks")
    micro_batch_size: int | None = Field(
        None, ge=1, description="sequences a forward pass on one rank; none: derived"
    )
    num_train_epochs: float = Field(1.0, gt=0)
    max_steps: int = Field(-1, ge=-1, description="overrides num_train_epochs when positive")
    learning_rate: float | None = Field(
        None, gt=0, description="peak of the schedule; none: by the model's size, by the rules"
    )
    lr_scheduler_type: Scheduler = "cosine"
    warmup_steps: Annotated[float, Field(ge=0)] = Field(
        0.05, description="below 1: a share of all steps"
    )
    weight_decay: float = Field(0.0, ge=0, description="biases and norms are left out")
    max_grad_norm: float = Field(1.0, ge=0, description="0: gradients are not clipped")
    optim: Literal["adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit"] = Field(
        "adamw_torch",
        description="the 8-bit ones keep AdamW's moments in a quarter of the memory, paged also in "
        "the host's where the GPU's is short; they need CUDA",
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    bf16: bool = Field(False, description="bfloat16 autocast; weights stay float32")
    fp16: bool = Field(False, description="float16 autocast with a loss scaler; needs CUDA")
    gradient_checkpointing: bool = Field(False, description="recompute activations in backward")
    torch_compile: bool = Field(False, description="fuse the model's kernels by torch.compile")
    seed: int = Field(42, ge=0)
    full_determinism: bool = Field(False, description="deterministic kernels only; slower")
    logging_steps: int = Field(10, ge=1)
    eval_steps: int = Field(100, ge=1)
    save_steps: int | None = Field(
        None,
        ge=1,
        description="steps from checkpoint to checkpoint; none: as often as pays, by what one "
        "costs and by the time between failures",
    )
    save_total_limit: int = Field(2, ge=1, description="newest checkpoints kept; the best too")
    save_keep_every: int | None = Field(
        None, ge=1, description="checkpoints of steps that it divides are kept for good"
    )
    metric_for_best_model: str | None = Field(
        None, description="none: the task's own validation score"
    )
    greater_is_better: bool | None = Field(None, description="none: as the task says")
    load_best_model_at_end: bool = Field(
        True, description="the model that leaves the step is the best one validated"
    )
    early_stopping_patience: int | None = Field(
        None, ge=1, description="validations without a better score before it stops"
    )
    early_stopping_threshold: float = Field(0.0, ge=0)

    @field_validator("max_steps")
    @classmethod
    def _some_steps(cls, value: int) -> int:
        if value == 0:
            raise ValueError("give a positive number, or -1 to go by epochs")
        return value

    @model_validator(mode="after")
    def _one_precision(self) -> TrainingConfig:
        if self.bf16 and self.fp16:
            raise at_odds(
                "training.fp16", True, "it excludes training.bf16", "set one of the two to false"
            )
        return self


class RecoveryConfig(Section):
    """What happens when something breaks, and what is used again."""

    reuse_ttl_seconds: Seconds = Field(
        3600, ge=0, description="age up to which another run's step outputs are used again"
    )
    checkpoints: str | None = Field(
        None,
        min_length=1,
        description="folder or s3:// address below which the run's checkpoints lie; none: the "
        "run's folder",
    )
    seconds_between_failures: Seconds = Field(
        14_400, gt=0, description="to expect on average, until the run has had failures of its own"
    )
    stop_grace_seconds: Seconds = Field(
        20, gt=0, description="time for ranks to leave after SIGTERM before SIGKILL"
    )
    max_failures_per_class: int = Field(
        3, ge=1, description="in a row without a new checkpoint, before a class of failure stops it"
    )
    max_preemptions: int | None = Field(
        None, ge=1, description="the same for preemptions; none: max_failures_per_class"
    )
    backoff_seconds: Seconds = Field(
        2, ge=0, description="wait before the first retry; doubles with each in a row"
    )
    backoff_max_seconds: Seconds = Field(60, ge=0, description="longest such wait")
    jitter: bool = Field(True, description="takes up to a quarter off each such wait")
    breaker_failures: int = Field(
        3,
        ge=1,
        description="of any class but preemption, in a row without a new checkpoint, "
        "before the circuit breaker opens",
    )
    breaker_reset_seconds: Seconds = Field(
        120, ge=0, description="how long it stays open before one last try"
    )
    resubmit: int = Field(
        3,
        ge=0,
        description="how often in a row without a new checkpoint the pipeline is submitted again "
        "after a step was lost with its pod, by the exit handler through Kubeflow Pipelines; "
        "never after a termination; 0: never",
    )
    on_demand_at_last: bool = Field(
        False,
        description="whether the last attempt that lost nodes leave to the run asks for nodes "
        "without compute.pods.spot",
    )
    min_nodes: int | None = Field(
        None,
        ge=1,
        description="fewest nodes to go on with where others stay away; none: all of them. The "
        "global batch stays as it is",
    )
    hang_timeout_seconds: Seconds = Field(
        600,
        gt=0,
        description="a rank that makes no progress for so long hangs, and all are started "
        "again; must be longer than the longest batch or save",
    )
    start_timeout_seconds: Seconds = Field(
        1800, gt=0, description="the same before a rank's first step, and after its last one"
    )
    lease_seconds: Seconds = Field(
        60,
        gt=0,
        description="a supervisor or an agent that gives no sign of life for so long counts as "
        "dead, and may be succeeded",
    )
    spike_threshold: float = Field(
        6.0,
        ge=0,
        description="deviations above the median loss from which a step counts as diverged, if "
        "it also gives back half of what was learned; 0: only what is not finite does",
    )
    spike_window: int = Field(
        128, ge=4, description="last steps whose losses that median is of; half of them at least"
    )
