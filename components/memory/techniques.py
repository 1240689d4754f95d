"""What the techniques of a run add to a training step.

First of all, that is a frozen model that each rank runs next to the one that trains: a teacher or a
reference.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from steadytrain.components.memory.model import any_shape, architecture_of, label_count
from steadytrain.components.memory.setting import FP32, FrozenModel, Setting
from steadytrain.components.memory.shape import Shape
from steadytrain.components.shared.chunks import COMPARISON_COPIES, answer_bytes, comparison_rows
from steadytrain.components.shared.config import ModelConfig, RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.base import load_task
from steadytrain.components.techniques.distillation import HiddenConfig


def with_techniques(
    setting: Setting, config: RunConfig, shape: Shape, *, sequences: int
) -> Setting:
    """Return the setting of a run, with the needs of its task and of its techniques.

    Args:
        setting: without them; its micro-batch is the configured one.
        shape: of the model that trains.
        sequences: of a rank's share of the global batch.

    Raises:
        BadInput: as for `run_frozen_model`.
    """
    training, task = config.training, load_task(config.data.task)
    adversarial = training.adversarial
    targets = task.targets(training) if task.targets and shape.fused else 1.0
    return replace(
        setting,
        micro_batch=setting.micro_batch * task.sequences,
        # Labeled texts are padded. Packed rows need a mask too if attention has no document
        # support.
        masked=shape.labels > 0 or not shape.documents,
        accumulates=setting.accumulates or adversarial.passes > 1,
        weight_copies=training.weight_copies,
        frozen_model=run_frozen_model(config, shape, half=setting.half, length=setting.length),
        contrasts=training.contrastive.on,
        returns_states=training.batch_contrastive.on and not task.contrasts,
        copies=2 if training.r_drop.on else 1,
        passes=adversarial.passes,
        ascents=adversarial.ascents,
        differentiates=training.r_drop.on or training.focal_loss.on or training.distillation.stored,
        answers=answers_on_device(config, length=setting.length, sequences=sequences),
        targets=targets,
    )


def run_frozen_model(
    config: RunConfig, shape: Shape, *, half: bool, length: int
) -> FrozenModel | None:
    """Return what the run's teacher or reference needs; None without one.

    Args:
        shape: of the model that trains.
        half, length: as for `frozen_model_of`.

    Raises:
        BadInput: the teacher's architecture is unknown, or can't be built here.
    """
    address, hidden = config.training.distillation.teacher, config.training.distillation.hidden
    if config.training.distillation.stored:
        return None
    if address is not None:
        teacher = _shape(address, label_count(config), "training.distillation.teacher")
        frozen = frozen_model_of(teacher, half=half, length=length)
        return _matched(frozen, (shape, teacher), hidden, half=half) if hidden.on else frozen
    task = load_task(config.data.task)
    if not task.reference:
        return None
    frozen = frozen_model_of(shape, half=half, length=length)
    block = FP32 * comparison_rows(shape.vocabulary) * shape.vocabulary
    return replace(
        frozen,
        # With adapters, the frozen model that they are attached to is the reference.
        weights=0 if config.model.adapter.freezes else frozen.weights,
        kept=0,
        # The model that trains has the shape of its reference.
        flops=(3 if task.measures else 1) * frozen.flops,
        # Likelihoods are computed in 32 bits, in place if the logits have as many.
        compared=block if half else 0,
    )


def _matched(
    found: FrozenModel, shapes: tuple[Shape, Shape], hidden: HiddenConfig, *, half: bool
) -> FrozenModel:
    """Add what comparing hidden states needs.

    Raises:
        BadInput: the layers do not fit together.
    """
    student, teacher = shapes
    pairs = len(hidden.pairs(student.layers, teacher.layers))
    width = 2 if half else FP32
    projected = student.hidden != teacher.hidden
    # The compared rows of the student, what the projection makes of them, and of the teacher, in
    # 32 bits; and their difference, or their norms and products.
    each = FP32 * (student.hidden * (2 if projected else 1) + 3 * teacher.hidden)
    return replace(
        found,
        # All states of the teacher exist at the end of its forward pass.
        forward=found.forward + width * (teacher.layers + 1) * teacher.hidden,
        kept=found.kept + width * pairs * teacher.hidden,
        # The last state is returned along with the loss, in 32 bits.
        matched=pairs * each + FP32 * student.hidden,
        projection=student.hidden * teacher.hidden if projected else 0,
    )


def grader_of(config: RunConfig, *, half: bool, length: int) -> FrozenModel | None:
    """Return what a curriculum's reference model needs while it scores rows; None without one.

    Args:
        half, length: as for `frozen_model_of`.

    Raises:
        BadInput: its architecture is unknown, or can't be built here.
    """
    address = config.training.curriculum.model
    if address is None:
        return None
    shape = _shape(address, label_count(config), "training.curriculum.model")
    return frozen_model_of(shape, half=half, length=length)


def answering_teacher(config: RunConfig, *, half: bool, length: int) -> FrozenModel:
    """Return what the teacher needs while its answers are stored, before training begins.

    Args:
        half, length: as for `frozen_model_of`.

    Raises:
        BadInput: as for `run_frozen_model`.
    """
    address = config.training.distillation.teacher
    assert address is not None, "there is a teacher"
    shape = _shape(address, label_count(config), "training.distillation.teacher")
    return frozen_model_of(shape, half=half, length=length)


def answers_on_device(config: RunConfig, *, length: int, sequences: int) -> int:
    """Return the bytes of a teacher's stored answers in device memory; 0 if none are stored.

    A rank has those of all its micro-batches of this step, and fetches those of the next one.

    Args:
        length: tokens of a sequence. sequences: of a rank's share of the global batch.
    """
    distillation, task = config.training.distillation, load_task(config.data.task)
    if not distillation.stored:
        return 0
    targets = sequences * (length if task.language_model else 1)
    return 2 * targets * answer_bytes(distillation.top_k or 0)


@functools.cache
def _shape(address: str, labels: int, field: str) -> Shape:
    try:
        return any_shape(architecture_of(ModelConfig(base=address)), labels)
    except BadInput as error:
        raise BadInput(f"{field} = {address!r}: {error.message}", remedy=error.remedy) from error


def frozen_model_of(shape: Shape, *, half: bool, length: int) -> FrozenModel:
    """Return what a model of this shape needs, complete on each rank and without gradients.

    Args:
        half: whether its weights and activations have 16 bits.
        length: tokens of a sequence, for the attention's FLOPs.
    """
    width = 2 if half else FP32
    used = sum(matrix.size for matrix in shape.matrices) + shape.used
    head = shape.hidden * (shape.labels or shape.vocabulary)
    # The stream, its norm, and the larger half of a layer. Nothing is kept from layer to layer.
    inside = max(2 * shape.attention + 2 * shape.key_value, 3 * shape.intermediate)
    logits = shape.labels or (0 if shape.fused else shape.vocabulary)
    rows = 0 if shape.labels else comparison_rows(shape.vocabulary)
    return FrozenModel(
        weights=width * shape.parameters,
        forward=width * (2 * shape.hidden + inside),
        kept=width * (logits or shape.hidden),
        compared=COMPARISON_COPIES * FP32 * rows * shape.vocabulary,
        flops=2.0 * (shape.layers * used + head) + 4.0 * shape.layers * shape.attention * length,
    )
