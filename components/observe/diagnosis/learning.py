"""Rules about what the model learns: loss, gradients, and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import Final

from steadytrain.components.observe.diagnosis.rule import ObservedRun, Rule
from steadytrain.components.shared.events.types import (
    CLIPPED_SHARE,
    CLIPPED_STEPS,
    LayersMeasured,
)

_AFTER_BEST: Final = 3
"""Validations after the best one before overfitting can be found."""
_RISE: Final = 0.05
"""Rise of the validation loss above its best, relative to it. Prechelt's criterion GL."""
_LEARNED: Final = 0.02
"""Fall of the training loss, relative to its start, below which nothing was learned."""
_RISEN: Final = 1.5
"""Training loss relative to its start, above which training goes the wrong way."""
_STILL_FALLING: Final = 0.05
"""Fall of the validation loss in the last tenth of the steps, relative to it."""
_FLAT: Final = 0.002
_CLIPPED: Final = 10.0
"""Gradients this many times above training.max_grad_norm explode."""
_GROWN: Final = 100.0
"""Gradients this many times above the first ones explode, if nothing clips them."""
_VANISHED: Final = 1e-3
"""Norm of a layer's gradients, relative to the layer with the largest one."""
_ANY_GRADIENT: Final = 1e-7
_FASTEST, _SLOWEST = 0.1, 1e-5
"""Bounds on a step's update, relative to the weights."""
_MEASURED: Final = 3
"""Measurements of layers that must agree."""
_LIGHTEST, _HEAVIEST = 0.01, 1000.0
"""Bounds on a learned weight. It settles at 1 / (2 loss), so these are losses of 50 nats, far worse
than guessing, and of 0.0005 nats, which is learned by heart."""
_WORTHWHILE: Final = 0.005
"""Gain of a longer run, relative to the validation loss, below which nothing is said."""
_REPORTS: Final = 10
"""Reported steps before a rule about the loss judges."""


def overfitting(run: ObservedRun) -> str:
    """The validation loss rises after its best value while the training loss falls."""
    scored = [
        (item.step, item.metrics["loss"])
        for item in run.validations
        if math.isfinite(item.metrics.get("loss", math.nan))
    ]
    if len(scored) <= _AFTER_BEST:
        return ""
    at, best = min(scored, key=lambda item: item[1])
    after = [loss for step, loss in scored if step > at][-_AFTER_BEST:]
    if len(after) < _AFTER_BEST or min(after) - best <= _RISE * abs(best):
        return ""
    before = [step.loss for step in run.losses if step.step <= at][-_REPORTS:]
    now = [step.loss for step in run.losses if step.step > at][-_REPORTS:]
    if not before or not now or median(now) >= median(before):
        return ""
    return (
        f"since step {at:,}, the validation loss has risen from {best:.4g} to {after[-1]:.4g}, "
        f"while the training loss has fallen from {median(before):.4g} to {median(now):.4g}"
    )


def underfitting(run: ObservedRun) -> str:
    """The loss hardly fell, or it still falls fast when the run ends."""
    losses = run.losses
    if len(losses) < _REPORTS or run.progress < 0.5:
        return ""
    began, now = median(run.first_losses), median(step.loss for step in losses[-_REPORTS // 2 :])
    if began - now < _LEARNED * abs(began):
        return (
            f"after {run.progress:.0%} of the steps, the training loss is {now:.4g}; it was "
            f"{began:.4g} at the start"
        )
    if run.progress < 1:
        return ""
    late = [step.loss for step in losses if step.step > 0.8 * losses[-1].step]
    middle = len(late) // 2
    if middle < _MEASURED:
        return ""
    earlier, last = median(late[:middle]), median(late[middle:])
    if earlier - last < _STILL_FALLING * abs(earlier):
        return ""
    return (
        f"the run has ended while its training loss was still falling, from {earlier:.4g} to "
        f"{last:.4g} in the last tenth of the steps"
    )


def plateau(run: ObservedRun) -> str:
    """The training loss no longer falls, although the learning rate is high and steps remain."""
    losses = run.losses
    if len(losses) < 3 * _REPORTS or run.progress < 0.3:
        return ""
    window = losses[-len(losses) // 3 :]
    if window[-1].learning_rate < 0.1 * run.peak_rate:
        return ""
    middle = len(window) // 2
    before = median(step.loss for step in window[:middle])
    now = median(step.loss for step in window[middle:])
    if before - now >= _FLAT * abs(before):
        return ""
    return (
        f"the training loss has stayed at {now:.4g} since step {window[0].step:,}, at "
        f"{run.progress:.0%} of the steps"
    )


def vanishing_gradients(run: ObservedRun) -> str:
    """A layer gets almost no gradient, or the whole model gets none."""
    lowest = [_lowest(item) for item in _newest(run)]
    named = {name for name, _ in lowest}
    if len(named) == 1 and all(share < _VANISHED for _, share in lowest):
        name, share = lowest[-1]
        return f"the gradients of {name} are {share:.1e} of those of the layer with the largest"
    norms = [step.grad_norm for step in run.recent[-_MEASURED:]]
    if len(norms) == _MEASURED and all(norm < _ANY_GRADIENT for norm in norms):
        return f"the norm of all gradients is {norms[-1]:.1e}"
    return ""


def exploding_gradients(run: ObservedRun) -> str:
    """Gradients are far above the clipping norm, or have grown far above the first ones."""
    recent = run.recent
    norms = [step.grad_norm for step in recent if math.isfinite(step.grad_norm)]
    if len(norms) < _REPORTS:
        return ""
    limit, now = run.setting("training", "max_grad_norm"), median(norms)
    if limit:
        bound, against = _CLIPPED * limit, f"training.max_grad_norm is {limit:g}"
    else:
        first = median(step.grad_norm for step in list(run.steps)[:_MEASURED])
        bound, against = _GROWN * first, f"it was {first:.3g} at the start"
    if now <= bound:
        return ""
    return f"the norm of the gradients is {now:.3g}, and {against}{_largest(run)}"


def clipped_gradients(run: ObservedRun) -> str:
    """Most of the last steps were clipped, although their gradients do not explode."""
    limit, recent = run.setting("training", "max_grad_norm"), run.recent
    if not (limit and len(recent) >= _REPORTS) or exploding_gradients(run):
        return ""
    steps = recent[-1].step - recent[0].step
    clipped = recent[-1].clipped_steps - recent[0].clipped_steps
    if steps < CLIPPED_STEPS or clipped <= CLIPPED_SHARE * steps:
        return ""
    norms = [step.grad_norm for step in recent if math.isfinite(step.grad_norm)]
    usual = quantiles(norms, n=10)[-1]
    return (
        f"training.max_grad_norm = {limit:g} clipped {clipped:,} of the last {steps:,} steps; nine "
        f"of ten reported norms are below {usual:.3g}"
    )


def learning_rate_too_high(run: ObservedRun) -> str:
    """Training diverges, the loss rises, or each step changes the weights by a large share."""
    if run.diverged:
        return f"training diverged at step {run.diverged[-1]:,}"
    if len(losses := run.losses) >= _REPORTS:
        began, now = run.first_losses[0], median(step.loss for step in losses[-_MEASURED:])
        if now > _RISEN * began > 0:
            return f"the training loss has risen from {began:.4g} at the start to {now:.4g}"
    ratios = _ratios(run)
    if ratios and min(ratios) > _FASTEST:
        return f"each step changes the weights of half of the layers by {ratios[-1]:.1%} or more"
    return ""


def learning_rate_too_low(run: ObservedRun) -> str:
    """Each step changes the weights by a tiny share, although the rate is near its peak."""
    ratios = _ratios(run)
    if ratios and max(ratios) < _SLOWEST:
        return f"each step changes the weights of half of the layers by less than {ratios[-1]:.1e}"
    return ""


def learning_rate_not_scaled(run: ObservedRun) -> str:
    """The global batch differs from `training.base_global_batch_size`, and nothing scales the rate.

    The number of ranks does not matter: it leaves the global batch as it is.
    """
    base, used, scaling = (
        run.setting("training", field)
        for field in ("base_global_batch_size", "global_batch_size", "lr_scaling")
    )
    if base in (None, used) or scaling != "none":
        return ""
    return (
        f"a step has {used} sequences, the learning rate was chosen for {base}, and "
        "training.lr_scaling is none"
    )


def still_improving(run: ObservedRun) -> str:
    """A power law fits the validation loss, and predicts a lower one for half as many steps more.

    It must also predict the last quarter of the curve from the part before, to within half of the
    gain.
    """
    if run.progress < 1 or run.ready is None:
        return ""
    improving = [
        (item.step, item.metrics["loss"])
        for item in run.validations
        if math.isfinite(item.metrics.get("loss", math.nan)) and item.step > 0
    ]
    steps = run.ready.max_steps
    outlook = extrapolated(improving, steps + steps // 2)
    if outlook is None or outlook.gain < _WORTHWHILE * improving[-1][1]:
        return ""
    epochs = f"{run.steps[-1].epoch / 2:.2g}"
    epochs += " more epoch" if epochs == "1" else " more epochs"
    return (
        f"the validation loss is {improving[-1][1]:.4g}, and {epochs} "
        f"({steps // 2:,} steps) would gain about {outlook.gain:.2g}, by a power law "
        f"through {len(improving)} validations; from the first three quarters of them, it predicts "
        f"the others to {outlook.error:.1g}"
    )


def loss_weight_collapsed(run: ObservedRun) -> str:
    """A learned weight of a part's loss is below 0.01 or above 1000."""
    metrics = run.validations[-1].metrics if run.validations else {}
    for name, weight in metrics.items():
        part = name.removesuffix("_loss_weight")
        if part != name and not _LIGHTEST <= weight <= _HEAVIEST:
            return f"the loss of the part {part!r} has the weight {weight:.3g}"
    return ""


def _newest(run: ObservedRun) -> list[LayersMeasured]:
    """Return the newest measurements of layers; none if there are too few."""
    layers = list(run.layers)[-_MEASURED:]
    return layers if len(layers) == _MEASURED else []


def _lowest(measured: LayersMeasured) -> tuple[str, float]:
    """Return the layer with the smallest gradients, and their share of the largest ones."""
    name = min(measured.gradient, key=measured.gradient.__getitem__)
    largest = max(measured.gradient.values())
    return name, measured.gradient[name] / largest if largest else 1.0


def _largest(run: ObservedRun) -> str:
    """Name the layer with the largest gradients; "" without measurements."""
    if not run.layers:
        return ""
    gradient = run.layers[-1].gradient
    name = max(gradient, key=gradient.__getitem__)
    total = math.hypot(*gradient.values()) or 1.0
    return f"; {name} has {gradient[name] ** 2 / total**2:.0%} of its square"


def _ratios(run: ObservedRun) -> list[float]:
    """Return the median ratio of update to weight over the layers, for the newest measurements.

    Only those near the peak of the learning rate count, so that warm-up and decay do not look like
    a rate that is too low.
    """
    rates = {step.step: step.learning_rate for step in run.steps}
    near = [item for item in _newest(run) if _near_peak(rates, item.step, run.peak_rate)]
    return [_ratio(item) for item in near] if len(near) == _MEASURED else []


def _near_peak(rates: Mapping[int, float], step: int, peak: float) -> bool:
    """Return whether the reported step closest to a step has at least half of the peak rate."""
    closest: Iterable[int] = sorted(rates, key=lambda other: abs(other - step))[:1]
    return any(rates[other] >= peak / 2 for other in closest)


def _ratio(measured: LayersMeasured) -> float:
    return median(
        measured.update[name] / weight for name, weight in measured.weight.items() if weight > 0
    )


_LOWER: Final = 1 / 5
"""Between the factors 3 and 10 of the advice."""
LEARNING: Final = (
    Rule(
        "overfitting",
        overfitting,
        "The model learns the training data by heart.",
        "Stop earlier (training.early_stopping_patience), train for fewer epochs, raise "
        "training.weight_decay, or add data. training.load_best_model_at_end keeps the best model.",
        "Prechelt 1998, Early Stopping - But When? (criteria GL and UP)",
    ),
    Rule(
        "underfitting",
        underfitting,
        "The model has learned less than it could.",
        "Train for more steps (training.num_train_epochs), raise training.learning_rate, or use a "
        "larger model.",
        "Goodfellow, Bengio and Courville 2016, Deep Learning, section 5.2",
    ),
    Rule(
        "plateau",
        plateau,
        "The training loss no longer falls.",
        "Stop, or let the learning rate fall sooner: fewer training.max_steps, or "
        "training.lr_scheduler_type cosine or linear.",
        "PyTorch documentation, ReduceLROnPlateau",
    ),
    Rule(
        "vanishing_gradients",
        vanishing_gradients,
        "A part of the model gets almost no gradient, so it does not learn.",
        "Check the initialization, normalization and frozen parts of the model. With fp16, use "
        "training.bf16.",
        "Glorot and Bengio 2010, Understanding the difficulty of training deep feedforward "
        "neural networks",
    ),
    Rule(
        "exploding_gradients",
        exploding_gradients,
        "Clipping removes most of each gradient, or nothing clips it.",
        "Lower training.learning_rate, raise training.warmup_steps, or set training.max_grad_norm "
        "to 1.",
        "Pascanu, Mikolov and Bengio 2013, On the difficulty of training recurrent neural networks",
        rate_factor=_LOWER,
    ),
    Rule(
        "clipped_gradients",
        clipped_gradients,
        "Most steps are clipped, which only lowers the learning rate in a strange way.",
        "Lower training.learning_rate, or raise training.max_grad_norm to the norm that nine of "
        "ten steps stay below.",
        "Godbole et al. 2023, Deep Learning Tuning Playbook, section on gradient clipping",
        rate_factor=_LOWER,
    ),
    Rule(
        "learning_rate_too_high",
        learning_rate_too_high,
        "The steps are too large for the weights.",
        "Lower training.learning_rate by a factor of 3 to 10, or raise training.warmup_steps.",
        "Stanford CS231n, Neural Networks 3: ratio of weights to updates",
        rate_factor=_LOWER,
    ),
    Rule(
        "learning_rate_too_low",
        learning_rate_too_low,
        "The steps are too small to change the weights.",
        "Raise training.learning_rate by a factor of 10.",
        "Stanford CS231n, Neural Networks 3: ratio of weights to updates",
        rate_factor=10.0,
    ),
    Rule(
        "learning_rate_not_scaled",
        learning_rate_not_scaled,
        "The learning rate was chosen for another global batch.",
        "Set training.lr_scaling to linear (SGD) or sqrt (Adam), or leave out "
        "training.base_global_batch_size.",
        "Goyal et al. 2017, Accurate, Large Minibatch SGD; Malladi et al. 2022, On the SDEs and "
        "Scaling Rules for Adaptive Gradient Algorithms",
    ),
    Rule(
        "still_improving",
        still_improving,
        "The validation loss would fall further.",
        "Start a longer run: raise training.num_train_epochs or training.max_steps.",
        "Hestness et al. 2017, Deep Learning Scaling is Predictable, Empirically",
    ),
    Rule(
        "loss_weight_collapsed",
        loss_weight_collapsed,
        "Learned loss weights leave a part out, or leave only it.",
        "Lower the lr_scale of log_variances in param_groups, or give fixed weights with "
        "loss_weights instead of loss_weighting.",
        "Kendall, Gal and Cipolla 2018, Multi-Task Learning Using Uncertainty to Weigh Losses",
    ),
)


_VALIDATIONS: Final = 8
"""Fewest validations for a fit with three unknowns and a part held out."""
_EXPONENTS: Final = [0.05 * step for step in range(1, 61)]


@dataclass(frozen=True)
class Outlook:
    """What more steps would gain.

    gain: fall of the loss below the fit at the last validation.
    error: of the last quarter of the curve, predicted from the part before; the mean deviation.
    """

    gain: float
    error: float


@dataclass(frozen=True)
class _PowerLaw:
    """The loss is floor + scale * step ** -exponent."""

    floor: float
    scale: float
    exponent: float

    def at(self, step: float) -> float:
        return self.floor + self.scale * math.pow(step, -self.exponent)

    def deviation(self, points: Sequence[tuple[int, float]]) -> float:
        return fmean(abs(self.at(step) - loss) for step, loss in points)


def extrapolated(points: Sequence[tuple[int, float]], step: int) -> Outlook | None:
    """Return what training until `step` would gain; None if no power law fits well enough.

    Args:
        points: steps and losses, by step.
    """
    if len(points) < _VALIDATIONS:
        return None
    early = len(points) * 3 // 4
    whole, first = _fit(points), _fit(points[:early])
    if whole is None or first is None:
        return None
    gain = whole.at(points[-1][0]) - whole.at(step)
    error = first.deviation(points[early:])
    if gain <= 0 or error > gain / 2 or whole.deviation(points) > gain / 2:
        return None
    return Outlook(gain, error)


def _fit(points: Sequence[tuple[int, float]]) -> _PowerLaw | None:
    """Return the falling power law with the least squares; None if the loss does not fall."""
    best, least = None, math.inf
    losses = [loss for _, loss in points]
    mean = fmean(losses)
    for exponent in _EXPONENTS:
        powers = [step**-exponent for step, _ in points]
        center = fmean(powers)
        spread = sum((power - center) ** 2 for power in powers)
        shared = sum((power - center) * loss for power, loss in zip(powers, losses, strict=True))
        law = _PowerLaw(mean - shared / spread * center, shared / spread, exponent)
        squares = sum((law.at(step) - loss) ** 2 for step, loss in points)
        if law.scale > 0 and law.floor >= 0 and squares < least:
            best, least = law, squares
    return best
