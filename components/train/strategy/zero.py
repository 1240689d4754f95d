"""Optimizer, gradients and weights in shards, one more with each stage: DeepSpeed's ZeRO.

It does not use accelerate, which supports DeepSpeed only on accelerators: GPUs would then run
different code from what is tested on a CPU.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import Accelerator

from steadytrain.components.shared.config.optimizers import OptimizerSpec
from steadytrain.components.shared.config.strategies import DISK
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.quantities import size
from steadytrain.components.shared.toolchain import DISK_REMEDY, missing_for_disk
from steadytrain.components.train.checkpoint import Checkpoint
from steadytrain.components.train.checkpoint.snapshot import Piece, Region, full_piece, whole
from steadytrain.components.train.checkpoint.state import (
    allocate,
    by_parameter,
    model_tensors,
    restore_groups,
    settle_numbers,
    state_tensors,
)
from steadytrain.components.train.strategy.base import MakeOptimizer, Strategy
from steadytrain.components.train.strategy.zero_config import zero_config

# Locate a rank's part of the optimizer's weights and moments within DeepSpeed.
#
# A ZeRO optimizer works on flat tensors, each with ranges of many parameters one after another,
# and padding at the end. Their layout is internal to DeepSpeed; tests check it for the locked
# version.


@dataclass(frozen=True)
class Shard:
    """The range of a parameter's elements that this rank's optimizer updates.

    flat: the tensor that contains the range, from `offset` on; also the key of the optimizer's
        state. It is empty while its content is on disk.
    weights: `flat`, or its file.
    start: index of the first element within the parameter.
    count: number of elements.
    size: number of elements of the full parameter.
    """

    name: str
    parameter: torch.nn.Parameter
    flat: torch.Tensor
    weights: torch.Tensor
    offset: int
    start: int
    count: int
    size: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the same range of another tensor with the layout of `flat`."""
        return flat.detach().narrow(0, self.offset, self.count)

    def piece(self, name: str, flat: torch.Tensor) -> Piece:
        return Piece(name, self.of(flat), [self.start], [self.size])

    def region(self, flat: torch.Tensor) -> Region:
        return Region(self.of(flat), self.start, self.size)


def shards_of(zero: Any, module: torch.nn.Module, stage: int) -> Iterator[Shard]:
    """Yield this rank's shards of the parameters that are trained.

    Args:
        zero: DeepSpeed's optimizer for that stage.
    """
    shards = _of_weights if stage == 3 else _of_states
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            shard = shards(zero, name, parameter)
            if shard is not None and shard.count > 0:
                yield shard


def gradient_of(shard: Shard, stage: int) -> torch.Tensor:
    """Return a shard of an averaged gradient, float32, between the backward pass and the update."""
    parameter: Any = shard.parameter
    if stage == 3:
        from deepspeed.utils import safe_get_local_grad

        own: torch.Tensor = safe_get_local_grad(parameter)
        if shard.weights is not shard.flat:
            # The next gradient is read into the same buffer.
            own = own.clone()
        return own.flatten()[: shard.count]
    held = parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)
    flat: torch.Tensor = held.flatten().float()
    # Without a shard of its own, the gradient is complete on each rank.
    return flat if flat.numel() == shard.count else flat.narrow(0, shard.start, shard.count)


def spread_weights(zero: Any, shards: Sequence[Shard], stage: int) -> None:
    """Copy the optimizer's restored weights to the model."""
    if stage < 3:
        zero.update_lp_params()
        return
    for shard in shards:
        partition: torch.Tensor = shard.parameter.ds_tensor  # type: ignore[attr-defined]
        partition.data.narrow(0, 0, shard.count).copy_(shard.of(shard.weights))
    # Release the parameters that are complete on every rank: they are stale, and are gathered again
    # when needed. If they were gathered here, they would be missing from the trace that DeepSpeed
    # uses to fetch weights from then on.
    stale = [item for item in zero.persistent_parameters if item.ds_status.name == "AVAILABLE"]
    if stale:
        stale[0].partition(stale)


def _of_states(zero: Any, name: str, parameter: Any) -> Shard | None:
    """Stages 1 and 2: a group's parameters are stored one after another, split into equal parts."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    held, own = mapping.lp_fragment_address, mapping.hp_fragment_address
    flat = zero.single_partition_of_fp32_groups[mapping.param_group_index]
    return Shard(name, parameter, flat, flat, own.start, held.start, held.numel, parameter.numel())


def _of_weights(zero: Any, name: str, parameter: Any) -> Shard:
    """Stage 3: each parameter is split into equal parts. The last part is padded."""
    group, offset, part = zero.grad_position[zero.get_param_id(parameter)]
    start = part * torch.distributed.get_rank()
    count = min(part, parameter.ds_numel - start)
    flat = zero.fp32_partitioned_groups_flat[group]
    weights = stored(zero, flat, flat)
    return Shard(name, parameter, flat, weights, offset, start, count, parameter.ds_numel)


def stored(zero: Any, flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the optimizer where it is: in memory, or mapped from its file.

    Writing to it changes the file. DeepSpeed keeps groups of less than 1 MiB in memory.

    Args:
        flat: the weights that it belongs to, as in `Shard`.
        tensor: these weights, or one of the optimizer's tensors for them.
    """
    info = _files(zero, flat)
    held = info.tensors if info is not None else ()
    path = next((item.swap_path for item in held if item.compute_tensor is tensor), None)
    if path is None:
        return tensor
    return torch.from_file(path, shared=True, size=info.numel(), dtype=torch.float32)


def _files(zero: Any, flat: torch.Tensor) -> Any:
    """Return what DeepSpeed knows about the files of weights; None if they are in memory."""
    swapper = getattr(zero, "optimizer_swapper", None)
    return None if swapper is None else swapper.swap_params_info.get(flat.ds_id)  # type: ignore[attr-defined]


def _prepare(folder: Path, spec: OptimizerSpec, needed: int) -> None:
    """Load what reads and writes files. It is compiled at first, which takes minutes.

    Args:
        needed: bytes of this node's files.

    Raises:
        BadInput: it cannot be compiled, the disk is too small, or DeepSpeed cannot store what the
            optimizer keeps.
    """
    setting = f"compute.offload = {DISK!r}"
    if spec.allocate is not None or not all(
        item.same_shape and item.bytes == torch.float32.itemsize for item in spec.tensors
    ):
        raise BadInput(
            f"{setting}: DeepSpeed stores float32 tensors of a weight's shape, and the optimizer "
            "keeps others",
            remedy="use another training.optim, or compute.offload: optimizer",
        )
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise BadInput(
            f"{setting}: the ranks of a node need {size(needed)}, and {folder} has {size(free)}",
            remedy="name a folder on a larger disk in compute.offload_path",
        )
    from deepspeed.ops.op_builder import AsyncIOBuilder

    try:
        AsyncIOBuilder().load()
    except (ImportError, OSError, RuntimeError) as error:
        lacking = ", ".join(missing_for_disk())
        why = f"this machine lacks {lacking}" if lacking else str(error)
        raise BadInput(
            f"{setting}: DeepSpeed's async_io cannot be compiled: {why}", remedy=DISK_REMEDY
        ) from error


_OWN_KERNEL: Final = "deepspeed_shm_comm"


def _deepspeed(*, on_cpu: bool) -> Any:
    """Import DeepSpeed. On a CPU, disable its kernel for ranks on one machine, and use gloo.

    The kernel would have to be compiled first, which takes a minute.
    """
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    if on_cpu:
        deepspeed.ops.__compatible_ops__[_OWN_KERNEL] = False
    return deepspeed


class Zero(Strategy):
    """A DeepSpeed engine of stage 1, 2 or 3 around the loop's own optimizer.

    Args:
        stage: 1 shards the optimizer's state, 2 also the gradients, 3 also the weights.
        bf16: whether to compute in bfloat16. The optimizer's weights stay float32.
        offload: as in `compute.offload`.
        folder: for this node's files, with offload "disk".

    Raises:
        BadInput: the optimizer state cannot be on disk here.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        module: torch.nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        stage: int,
        bf16: bool = False,
        offload: str = "none",
        folder: Path | None = None,
    ) -> None:
        deepspeed = _deepspeed(on_cpu=accelerator.device.type == "cpu")
        self.accelerator, self.module, self.stage = accelerator, module, stage
        self.optimizer, self.optimizer_spec = make_optimizer(module), make_optimizer.spec
        trained = sum(item.numel() for item in module.parameters() if item.requires_grad)
        tensors = len(self.optimizer_spec.tensors)
        if folder is not None:
            share = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) / accelerator.num_processes
            needed = int((tensors + 2) * torch.float32.itemsize * trained * share)
            _prepare(folder, self.optimizer_spec, needed)
        config = zero_config(
            stage=stage,
            bf16=bf16,
            offload=offload,
            parameters=sum(item.numel() for item in module.parameters()),
            trained=trained,
            tensors=tensors,
            folder=folder,
        )
        engine, self._zero, _, _ = deepspeed.initialize(
            model=module, optimizer=self.optimizer, config=config, dist_init_required=False
        )
        self.model: Any = engine

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        self.model.set_gradient_accumulation_boundary(is_boundary=last)
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)

    def clip(self, limit: float) -> None:
        """Let the engine clip during the update. A limit of 0 means to it that it does not."""
        self._zero.clip_grad = 0.0 if math.isinf(limit) else limit

    def update(self) -> float:
        self.model.step()
        norm = self.model.get_global_grad_norm()
        return math.nan if norm is None else float(norm)

    def pieces(self) -> Mapping[str, Sequence[Piece]]:
        shards = self._shards()
        alike = self._alike() if self.accelerator.process_index == 0 else {}
        model = [shard.piece(shard.name, shard.weights) for shard in shards]
        model += [full_piece(name, tensor) for name, tensor in alike.items()]
        return {"model": model, "optimizer": list(self._optimizer_pieces(shards))}

    def restore(self, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
        shards = self._shards()
        weights = {shard.name: shard.region(shard.weights) for shard in shards}
        alike = {name: whole(tensor) for name, tensor in self._alike().items()}
        checkpoint.copy_into("model", {**weights, **alike})
        checkpoint.copy_into("optimizer", self._allocated(checkpoint, shards))
        settle_numbers(self.optimizer, self.optimizer_spec)
        spread_weights(self._zero, shards, self.stage)
        restore_groups(self.optimizer, settings["groups"])

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self._of_each({shard.name: shard.of(shard.weights) for shard in self._shards()})

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's shards of the gradients, float32, scaled as the engine will clip them.

        Collective: the norm is that of all ranks.
        """
        shards = self._shards()
        own = {shard.name: gradient_of(shard, self.stage) for shard in shards}
        limit = self._zero.clip_grad
        if limit > 0:
            # Those of weights in host memory are there, too.
            squares = sum(float(item.square().sum()) for item in own.values())
            total = torch.tensor(squares, device=self.accelerator.device)
            torch.distributed.all_reduce(total)
            scale = min(1.0, limit / (math.sqrt(total.item()) + 1e-6))
            own = {name: item * scale for name, item in own.items()}
        return self._of_each(own)

    def _of_each(self, own: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return what this rank has of each trained weight: nothing of some."""
        nothing = torch.zeros(0, device=self.accelerator.device)
        trained = (name for name, item in self.module.named_parameters() if item.requires_grad)
        return {name: own.get(name, nothing) for name in trained}

    def moments(self, key: str) -> Mapping[str, torch.Tensor]:
        state = self.optimizer.state
        return {
            shard.name: shard.of(stored(self._zero, shard.flat, state[shard.flat][key]))
            for shard in self._shards()
            if key in state.get(shard.flat, {})
        }

    def weight_pieces(self, tensors: Mapping[str, torch.Tensor], suffix: str) -> list[Piece]:
        held = ((tensors[shard.name], shard) for shard in self._shards() if shard.name in tensors)
        return [
            Piece(f"{shard.name}{suffix}", item, [shard.start], [shard.size])
            for item, shard in held
        ]

    def weight_regions(self, tensors: Mapping[str, torch.Tensor], suffix: str) -> dict[str, Region]:
        held = ((tensors[shard.name], shard) for shard in self._shards() if shard.name in tensors)
        return {
            f"{shard.name}{suffix}": Region(item, shard.start, shard.size) for item, shard in held
        }

    def _spread(self) -> None:
        spread_weights(self._zero, self._shards(), self.stage)

    def _shards(self) -> list[Shard]:
        return list(shards_of(self._zero, self.module, self.stage))

    def _alike(self) -> dict[str, torch.Tensor]:
        """Return what every rank has in full: weights that are not trained, and buffers."""
        trained = {name for name, item in self.module.named_parameters() if item.requires_grad}
        return {
            name: tensor
            for name, tensor in model_tensors(self.module).items()
            if name not in trained
        }

    def _optimizer_pieces(self, shards: Sequence[Shard]) -> Iterator[Piece]:
        """Yield this rank's optimizer pieces. Rank 0 keeps the scalars, which all parameters share.

        As in a state that is not sharded, every parameter has them in a checkpoint.
        """
        scalars: dict[str, torch.Tensor] = {}
        for shard in shards:
            for key, tensor in state_tensors(
                self.optimizer, shard.flat, self.optimizer_spec
            ).items():
                if key in self._scalars:
                    scalars[key] = tensor.detach().cpu()
                else:
                    kept = stored(self._zero, shard.flat, tensor)
                    yield shard.piece(f"{shard.name}/{key}", kept)
        if self.accelerator.process_index == 0:
            for name, parameter in self.module.named_parameters():
                for key, tensor in scalars.items() if parameter.requires_grad else ():
                    yield full_piece(f"{name}/{key}", tensor)

    def _allocated(self, checkpoint: Checkpoint, shards: Sequence[Shard]) -> dict[str, Region]:
        """Allocate this rank's optimizer state, and return the regions that a checkpoint fills."""
        saved, regions = by_parameter(checkpoint.outline("optimizer")), {}
        for shard in shards:
            with self._in_memory(shard.flat, saved.get(shard.name, {}).keys()):
                state = allocate(
                    self.optimizer, shard.flat, self.optimizer_spec, saved.get(shard.name, {})
                )
            for key, tensor in state.items():
                kept = stored(self._zero, shard.flat, tensor)
                region = whole(tensor) if key in self._scalars else shard.region(kept)
                regions[f"{shard.name}/{key}"] = region
        return regions

    @contextlib.contextmanager
    def _in_memory(self, flat: torch.Tensor, keys: Set[str]) -> Iterator[None]:
        """Read weights from their file, if the optimizer keeps nothing yet under these keys.

        At the end, what it then keeps is in files, too.
        """
        if _files(self._zero, flat) is None or keys <= self.optimizer.state[flat].keys():
            yield
            return
        swapper = self._zero.optimizer_swapper
        swapper.swap_in_optimizer_state(flat)
        yield
        swapper.swap_out_optimizer_state(flat)

    @property
    def _scalars(self) -> set[str]:
        return {*self.optimizer_spec.scalars, *self.optimizer_spec.numbers}
