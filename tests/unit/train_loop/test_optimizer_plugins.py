"""Optimizers and schedules of other packages: what validation and the planner make of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.memory.states import states
from steadytrain.components.shared.config import TrainingConfig, from_mapping
from steadytrain.components.shared.config.optimizers import optimizer_spec
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.train.loop.optim import OptimizerBuilder, build_scheduler

from support.plugins import install_example
from support.training import LLAMA

MINIMAL = {"name": "tiny", "data": {"source": ["x"]}, "model": {"config": LLAMA}}
WHOLE_MATRICES = """
from steadytrain.components.shared.config.optimizers import OptimizerSpec
from steadytrain.components.shared.config.schedules import ScheduleSpec
O = OptimizerSpec(
    lambda *_, **__: None,
    unsupported={
        "cpu": "its kernels are for CUDA",
        "zero3": "it updates whole matrices",
        "fp16": "it cannot skip an update",
    },
)
S = ScheduleSpec(lambda step, settings: 1.0, last_rate=1e-4)
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    return install_example(tmp_path_factory.mktemp("example"))


@pytest.fixture
def installed(example, monkeypatch):
    monkeypatch.syspath_prepend(example)
    return str(example)


@pytest.fixture
def picky(monkeypatch, tmp_path):
    """Install an optimizer and a schedule with limits."""
    info = tmp_path / "picky-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: picky\nVersion: 2.0\n")
    groups = {"optimizers": "O", "schedules": "S"}
    entries = [f"[steadytrain.{group}]\npicky = picky:{name}" for group, name in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(entries))
    (tmp_path / "picky.py").write_text(WHOLE_MATRICES)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("field", "known"),
    [
        (
            "optim",
            "adafactor, adam, adamw_bnb_8bit, adamw_torch, lamb, lars, lion, muon, "
            "paged_adamw_8bit, schedule_free_adamw, sgd",
        ),
        (
            "lr_scheduler_type",
            "constant, constant_with_warmup, cosine, cosine_with_restarts, inverse_sqrt, linear, "
            "polynomial, range_test, reduce_lr_on_plateau, step_decay, warmup_stable_decay",
        ),
    ],
)
def test_unknown_names_are_rejected_with_the_known_ones(field, known):
    with pytest.raises(ConfigError, match=rf"training\.{field} = 'none_such'.*{known}"):
        from_mapping({**MINIMAL, "training": {field: "none_such"}})


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"compute": {"strategy": "zero3"}}, "it updates whole matrices, and compute.strategy is"),
        ({"compute": {"device": "cpu"}}, "its kernels are for CUDA, and compute.device is cpu"),
        (
            {"compute": {"strategy": "fsdp", "offload": "all"}},
            "its kernels are for CUDA, and compute.offload is all",
        ),
        ({"training": {"fp16": True}}, "it cannot skip an update, and training.fp16 is true"),
    ],
)
def test_unsupported_settings_of_an_optimizer_are_rejected(picky, sections, problem):
    training = {"optim": "picky", **sections.pop("training", {})}
    with pytest.raises(ConfigError, match=rf"training\.optim = 'picky': {problem}") as error:
        from_mapping({**MINIMAL, "training": training, **sections})
    assert "use adamw_torch, or change" in error.value.message


def test_fallbacks_skip_what_an_optimizer_does_not_support(picky):
    config = from_mapping({**MINIMAL, "training": {"optim": "picky"}})
    excluded = {name: config.conflict_with(name) for name in ("fsdp", "zero3", "cpu")}
    assert excluded == {
        "fsdp": "",
        "zero3": "training.optim picky: it updates whole matrices",
        "cpu": "training.optim picky: its kernels are for CUDA",
    }


def test_peak_rate_below_the_schedules_last_rate_is_rejected(picky):
    training = {"lr_scheduler_type": "picky", "learning_rate": 1e-4}
    with pytest.raises(ConfigError, match=r"learning_rate = 0\.0001: .* picky ends with 0\.0001"):
        from_mapping({**MINIMAL, "training": training})


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_bnb_8bit", "my_lion"])
def test_planner_knows_the_bytes_of_the_state(installed, optim):
    config = {**LLAMA, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    optimizer = OptimizerBuilder(TrainingConfig(optim=optim, learning_rate=1e-3))(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = {
        tensor.data_ptr(): tensor.nbytes
        for state in optimizer.state.values()
        for tensor in state.values()
        if torch.is_tensor(tensor) and tensor.dim()
    }
    planned = states(shape_of(config), Setting(length=64, optim=optim)).optimizer
    # bitsandbytes keeps small tensors in 32 bits.
    assert planned == pytest.approx(sum(tensors.values()), rel=0.03 if "8bit" in optim else 1e-9)


def test_ranks_shard_the_state(installed):
    shape = shape_of({**LLAMA, "vocab_size": 512})
    alone = states(shape, Setting(length=64, optim="my_lion")).optimizer
    shared = states(shape, Setting(length=64, optim="my_lion", strategy="fsdp", ranks=2)).optimizer
    assert alone == 4 * shape.parameters
    assert shared == alone // 2


def test_validation_and_planning_import_no_torch(example):
    code = (
        "import sys\n"
        "from steadytrain.components.shared.config import from_mapping\n"
        "from steadytrain.components.shared.config.optimizers import optimizer_spec\n"
        f"config = from_mapping({MINIMAL} | {{'training': {{'optim': 'my_lion',"
        " 'learning_rate': 1.0, 'lr_scheduler_type': 'trapezoid'}, 'compute': {'device': 'cpu'}})\n"
        "print(optimizer_spec(config.training.optim).device_bytes(1.0), 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(example)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "4.0 False\n", done.stderr


def test_learning_rate_rises_stays_and_falls(installed):
    training = TrainingConfig(lr_scheduler_type="trapezoid", learning_rate=1.0, warmup_steps=2)
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler, rates = build_scheduler(optimizer, training, 12), []
    for _ in range(13):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0, 0.5, *[1] * 9, 0.5, 0])


def test_spec_is_the_packages_object(installed):
    from steadytrain_example.optimizers import LION

    assert optimizer_spec("my_lion") is LION
