"""The training components of a run: creates them, calls them, and saves and restores their state.

A checkpoint stores the tensors of component X as the part "component-X", and its other state in
the shared JSON under "components". Both must match the configuration when the run resumes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from steadytrain.components.shared import plugins
from steadytrain.components.shared.effects import whole_steps
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.base import Batch
from steadytrain.components.techniques.averaging import AveragingConfig
from steadytrain.components.techniques.averaging.weights import AVERAGE, WeightAverage
from steadytrain.components.techniques.base import (
    TrainingComponent,
    TrainingContext,
    Update,
)
from steadytrain.components.techniques.noise_scale.estimate import NoiseScale
from steadytrain.components.train.checkpoint import Checkpoint, CheckpointStore
from steadytrain.components.train.checkpoint.snapshot import Piece
from steadytrain.components.train.failures import naming
from steadytrain.components.train.loop.monitors import (
    LayerHistograms,
    LayerMonitor,
    StepProfiler,
)
from steadytrain.components.train.loop.progress import Emitter
from steadytrain.components.train.loop.setup import TrainingSetup

Tensors = Mapping[str, torch.Tensor]
_AVERAGING: Final = "training.averaging"
"""A name that no component of a package can have."""


class Components:
    """The configured components on this rank. They are called in the order of their names.

    Those that only watch come last. A run may continue with others: their state is restored if the
    checkpoint has it.

    Raises:
        BadInput: no installed package provides a component, or it rejects its options.
        PluginFailed: a component raised an exception. All methods raise this.
    """

    def __init__(self, parts: TrainingSetup, emitter: Emitter) -> None:
        self._strategy = parts.strategy
        self._by_name: dict[str, TrainingComponent] = {
            name: plugins.create(plugins.COMPONENTS, name, options)
            for name, options in sorted(parts.config.training.components.items())
        }
        averaging = parts.config.training.averaging
        self._average: WeightAverage | None = None
        if averaging.on:
            _check_begins(averaging, parts.steps)
            start = whole_steps(averaging.start, parts.steps)
            self._average = self._by_name[_AVERAGING] = WeightAverage(averaging, start)
        self._watching = _watching(parts)
        self._all = {**self._by_name, **self._watching}
        if not self._all:
            return
        weights = self._strategy.weights()
        context = TrainingContext(
            weights,
            parts.rank,
            parts.world_size,
            Workspace.of(parts.config).folder,
            emitter.attempt,
            bool(self._strategy.spec.shards),
            self._strategy.gradients,
            emitter.emit,
        )
        self._each("begin", lambda component: component.begin(context))
        for name, component in self._by_name.items():
            with _naming(name, "tensors"):
                _check(component, weights)

    def before_step(self, step: int) -> None:
        self._each("before_step", lambda component: component.before_step(step))

    def after_backward(self, batch: Batch) -> None:
        self._each("after_backward", lambda component: component.after_backward(batch))

    def before_update(self, update: Update) -> None:
        self._each("before_update", lambda component: component.before_update(update))

    def after_update(self, update: Update) -> None:
        self._each("after_update", lambda component: component.after_update(update))

    def after_step(self, step: int) -> None:
        self._each("after_step", lambda component: component.after_step(step))

    def before_validation(self) -> None:
        self._each("before_validation", lambda component: component.before_validation())

    def after_validation(self, metrics: Mapping[str, float]) -> None:
        self._each("after_validation", lambda component: component.after_validation(metrics))

    def replaced_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the weights that are exported."""
        if (exporting := self._exporting) is None:
            return contextlib.nullcontext()
        name, key = exporting
        return self._strategy.exchanged(self._tensors(name)[key])

    @property
    def averages(self) -> bool:
        """Whether there is an average of the weights by now."""
        return self._average is not None and self._average.count > 0

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the average of its weights."""
        return self._strategy.exchanged(self._tensors(_AVERAGING)[AVERAGE])

    def exported(self, store: CheckpointStore, step: int, *, averaged: bool) -> Tensors:
        """Return the complete weights, by name, that replace the model's in the export of a step.

        Args:
            averaged: whether to export the average of the weights.

        Raises:
            CheckpointDamaged: there is no such checkpoint, or it differs from what was written.
        """
        exporting = (_AVERAGING, AVERAGE) if averaged else self._exporting
        if exporting is None:
            return {}
        name, key = exporting
        stored = store.load(step, _part(name)).items()
        return {
            full.removesuffix(f"/{key}"): tensor
            for full, tensor in stored
            if full.endswith(f"/{key}")
        }

    def pieces(self) -> dict[str, Sequence[Piece]]:
        """Return what this rank saves of the tensors, by part of the checkpoint."""
        result = {
            _part(name): [
                piece
                for key, tensors in self._tensors(name).items()
                for piece in self._strategy.weight_pieces(tensors, f"/{key}")
            ]
            for name in self._by_name
        }
        return {part: pieces for part, pieces in result.items() if pieces}

    def state(self) -> dict[str, Any]:
        """Return the rest of the state, by component, as plain JSON data."""
        return {
            name: {"tensors": sorted(self._tensors(name)), "state": self._plain(name)}
            for name in self._by_name
        }

    def watched(self) -> dict[str, Any]:
        """Return the state of the components that only watch, as plain JSON data."""
        states = {name: dict(item.state_dict()) for name, item in self._watching.items()}
        return {name: state for name, state in states.items() if state}

    def restore_watched(self, states: Mapping[str, Any]) -> None:
        """Restore what `watched` returned. A component without stored state starts without one."""
        for name in self._watching.keys() & states.keys():
            self._watching[name].load_state_dict(states[name])

    def restore(self, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
        """Restore all components.

        Args:
            state: what `state` returned then.

        Raises:
            BadInput: the checkpoint has the state of other components.
            CheckpointDamaged: the checkpoint differs from what was written.
        """
        names = {name: sorted(self._tensors(name)) for name in self._by_name}
        stored = {name: item["tensors"] for name, item in state.items()}
        if names != stored:
            raise BadInput(
                f"checkpoint {checkpoint} has the state of the training components "
                f"{_described(stored)}, and the configuration has {_described(names)}",
                remedy="use the training.components and the package versions that the run was "
                "started with, or give the run another name",
            )
        for name in self._by_name:
            regions = {
                full: region
                for key, tensors in self._tensors(name).items()
                for full, region in self._strategy.weight_regions(tensors, f"/{key}").items()
            }
            if regions:
                checkpoint.copy_into(_part(name), regions)
            with _naming(name, "load_state_dict"):
                self._by_name[name].load_state_dict(state[name]["state"])

    @property
    def _exporting(self) -> tuple[str, str] | None:
        """The component whose tensors are exported, and their name; None if there is none."""
        exports = ((name, item.exports) for name, item in self._by_name.items() if item.exports)
        return next(exports, None)

    def _each(self, hook: str, call: Callable[[TrainingComponent], None]) -> None:
        for name, component in self._all.items():
            with _naming(name, hook):
                call(component)

    def _tensors(self, name: str) -> Mapping[str, Tensors]:
        with _naming(name, "tensors"):
            return self._by_name[name].tensors()

    def _plain(self, name: str) -> Mapping[str, Any]:
        with _naming(name, "state_dict"):
            state = self._by_name[name].state_dict()
            json.dumps(state)
            return state


def _watching(parts: TrainingSetup) -> dict[str, TrainingComponent]:
    """Return the components that only watch, by the field that turns them on."""
    monitor, steps = parts.config.training.monitor, parts.config.training.profile.steps
    result: dict[str, TrainingComponent] = {}
    if monitor.layers:
        result["training.monitor"] = LayerMonitor(monitor.every_steps)
    if monitor.histograms:
        result["training.monitor.histograms"] = LayerHistograms(monitor.every_steps)
    if monitor.noise_scale:
        result["training.monitor.noise_scale"] = NoiseScale(
            monitor.every_steps,
            parts.config.training.global_batch_size,
            parts.module,
            parts.accelerator,
            parts.task.weight,
            # DDP's mean over the ranks and the scaler of fp16 multiply the loss.
            lambda: parts.world_size * (parts.strategy.scale or 1.0),
        )
    if steps is not None:
        result["training.profile"] = StepProfiler(*steps, parts.accelerator.device)
    return result


def _part(name: str) -> str:
    return f"component-{name}"


def _check(component: TrainingComponent, weights: Tensors) -> None:
    """Reject tensors that cannot be saved like weights, before the first step."""
    result = component.tensors()
    if component.exports and component.exports not in result:
        raise ValueError(f"exports = {component.exports!r}, but tensors() has {list(result)}")
    for key, tensors in result.items():
        for name, tensor in tensors.items():
            if name not in weights:
                raise ValueError(f"{key!r} has {name!r}, which is not the name of a trained weight")
            shape, expected = list(tensor.shape), list(weights[name].shape)
            if shape != expected or not tensor.is_contiguous():
                raise ValueError(
                    f"{key!r} of {name} has shape {shape}; it must have {expected} and be "
                    "contiguous"
                )


def _described(found: Mapping[str, Sequence[str]]) -> str:
    listed = (f"{name} ({', '.join(keys)})" if keys else name for name, keys in found.items())
    return "; ".join(listed) or "none"


def _naming(name: str, hook: str) -> contextlib.AbstractContextManager[None]:
    return naming(f"training component {name!r}", hook)


def _check_begins(averaging: AveragingConfig, steps: int) -> None:
    """Reject an average that no step of the run would be part of."""
    first = averaging.first_step(steps)
    if first > steps:
        raise BadInput(
            f"training.averaging.start = {averaging.start} with every {averaging.every}: the first "
            f"averaged step would be {first}, and the run has {steps}",
            remedy="start earlier, or average every few steps",
        )
