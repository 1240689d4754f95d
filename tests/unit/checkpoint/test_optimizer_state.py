"""The state of any optimizer survives a checkpoint to the bit, as its spec describes it."""

from __future__ import annotations

import pytest
import torch

from steadytrain.components.shared.config.optimizers import OptimizerSpec, StateTensor
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.train.checkpoint.state import (
    model_tensors,
    optimizer_settings,
    optimizer_tensors,
    restore_model,
    restore_optimizer,
)

from support.checkpoints import stored


class Counted(torch.optim.Optimizer):
    """Keeps Python numbers, 16-bit momentum and a row of column means for each parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group["lr"])

    def _update(self, weight, lr):
        state = self.state[weight]
        if not state:
            state.update(
                updates=0,
                decay=0.1,
                momentum=torch.zeros_like(weight, dtype=torch.bfloat16),
                columns=torch.zeros(weight.shape[-1]),
                unused=None,
            )
        state["updates"] += 1
        state["decay"] *= 0.7
        state["columns"] += weight.grad.reshape(-1, weight.shape[-1]).mean(0)
        state["momentum"].mul_(0.9).add_(weight.grad)
        rate = lr * (1 - state["decay"] ** state["updates"])
        weight.sub_(state["momentum"] + state["columns"], alpha=rate)


def spec(*tensors, **fields):
    return OptimizerSpec(lambda *_, **__: None, tensors, **fields)


COUNTED = spec(
    StateTensor("momentum", 2.0),
    StateTensor("columns", 0.0, same_shape=False),
    numbers=("updates", "decay"),
)
CASES = {
    "sgd": (lambda items: torch.optim.SGD(items, 0.1), spec()),
    "momentum": (
        lambda items: torch.optim.SGD(items, 0.1, momentum=0.9),
        spec(StateTensor("momentum_buffer")),
    ),
    "adagrad": (torch.optim.Adagrad, spec(StateTensor("sum"), scalars=("step",))),
    "numbers": (Counted, COUNTED),
}


def made(build):
    torch.manual_seed(1)
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(8, 4), "skipped": torch.nn.Linear(2, 2)})
    return model, build(list(model.parameters()))


def train(model, optimizer, steps):
    for step in steps:
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model["used"](inputs).square().sum().backward()
        if step == 4:
            # From here on, so that a new state must begin where it would have begun.
            model["skipped"](inputs[:, :2]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", CASES)
def test_resumed_training_equals_undisturbed_training(tmp_path, name):
    build, described = CASES[name]
    whole, begun, resumed = made(build), made(build), made(build)
    train(*whole, range(6))
    train(*begun, range(3))
    parts = {"model": model_tensors(begun[0]), "optimizer": optimizer_tensors(*begun, described)}
    saved = stored(tmp_path, parts)

    restore_model(resumed[0], saved)
    restore_optimizer(*resumed, described, saved, optimizer_settings(begun[1]))
    train(*resumed, range(3, 6))

    for key, weights in model_tensors(whole[0]).items():
        assert weights.equal(model_tensors(resumed[0])[key]), key
    for one, other in zip(whole[0].parameters(), resumed[0].parameters(), strict=True):
        kinds = [
            {key: type(value) for key, value in state.items() if value is not None}
            for state in (whole[1].state[one], resumed[1].state[other])
        ]
        assert kinds[0] == kinds[1]


@pytest.mark.parametrize(
    "described",
    [
        spec(StateTensor("momentum"), numbers=("updates", "decay")),
        spec(StateTensor("momentum"), StateTensor("columns"), numbers=("updates", "decay")),
    ],
    ids=["left out", "wrong shape"],
)
def test_state_that_differs_from_the_spec_is_rejected(described):
    model, optimizer = made(Counted)
    train(model, optimizer, range(1))
    with pytest.raises(BadInput, match=r"Counted keeps 'columns' of shape \[8\]") as error:
        optimizer_tensors(model, optimizer, described)
    assert "tensors, scalars or numbers" in error.value.remedy
