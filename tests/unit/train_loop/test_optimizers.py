"""The built-in optimizers: their libraries' updates, exact resume, memory, options and limits."""

from __future__ import annotations

import pytest
import pytorch_optimizer
import schedulefree
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.memory.states import states
from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import TrainingConfig, from_mapping
from steadytrain.components.shared.config.optimizers import optimizer_spec
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.train.checkpoint import Checkpoint
from steadytrain.components.train.checkpoint.state import (
    model_tensors,
    optimizer_settings,
    optimizer_tensors,
    restore_model,
    restore_optimizer,
)
from steadytrain.components.train.loop.optim import OptimizerBuilder, layer_matrices
from steadytrain.components.train.loop.validation import validate

from support import selected
from support.checkpoints import stored
from support.training import LLAMA, exported, losses_of, result_of, weights_digest

STEPS = 20
RATE, DECAY = 1e-2, 0.1
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
WHOLE = ("adafactor", "lamb", "lars", "muon")
"""They compute norms of whole tensors."""
NAMES = ("adam", "sgd", *WHOLE, "lion", "schedule_free_adamw")
MINIMAL = {"name": "tiny", "data": {"source": ["x"]}, "model": {"config": LLAMA}}
CONSTANT = {"lr_scheduler_type": "constant"}


def model_of(**sizes):
    torch.manual_seed(1)
    config = {**LLAMA, "vocab_size": 64, **sizes}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def take_steps(model, optimizers, numbers):
    """Update once for each number, with random gradients that follow from it."""
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()


def of_library(name, groups):
    """Return the library's own optimizers for the groups, in the order of their updates."""
    matrices = [group for group in groups if group.get("matrices")]
    others = [group for group in groups if not group.get("matrices")]
    match name:
        case "adam":
            return [torch.optim.Adam(groups, RATE, **ADAM)]
        case "sgd":
            return [torch.optim.SGD(groups, RATE, momentum=0.9)]
        case "adafactor":
            return [torch.optim.Adafactor(groups, RATE)]
        case "lamb":
            return [pytorch_optimizer.Lamb(groups, RATE, **ADAM, weight_decouple=False)]
        case "lars":
            return [pytorch_optimizer.LARS(groups, RATE)]
        case "lion":
            return [pytorch_optimizer.Lion(groups, RATE)]
        case "muon":
            muon = torch.optim.Muon(matrices, RATE, adjust_lr_fn="match_rms_adamw")
            return [muon, torch.optim.AdamW(others, RATE, **ADAM)]
        case "schedule_free_adamw":
            made = schedulefree.AdamWScheduleFree(groups, RATE, **ADAM)
            made.train()
            return [made]


@pytest.mark.parametrize("name", NAMES)
def test_updates_are_those_of_the_library(name):
    training = TrainingConfig(optim=name, learning_rate=RATE, weight_decay=DECAY)
    model, theirs = model_of(), model_of()
    optimizer = OptimizerBuilder(training)(model)
    names = {item: name for name, item in model.named_parameters()}
    twins = dict(theirs.named_parameters())
    groups = [
        {**group, "params": [twins[names[item]] for item in group["params"]]}
        for group in OptimizerBuilder(training).groups(model)
    ]

    take_steps(model, [optimizer], range(STEPS))
    take_steps(theirs, of_library(name, groups), range(STEPS))

    for key, weight in model.named_parameters():
        torch.testing.assert_close(weight, twins[key], rtol=2e-5, atol=2e-6, msg=key)


def test_muon_updates_the_matrices_of_the_layers_only():
    model = model_of()
    names = {name for name, item in model.named_parameters() if item in layer_matrices(model)}
    assert "model.embed_tokens.weight" not in names
    assert "lm_head.weight" not in names
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not [name for name in names if "norm" in name]
    assert len(names) == 7 * LLAMA["num_hidden_layers"]


def test_muon_without_layers_is_rejected():
    training = TrainingConfig(optim="muon", learning_rate=RATE)
    with pytest.raises(BadInput, match=r"training\.optim: .*Linear has no list of layers"):
        OptimizerBuilder(training)(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_continues_from_its_saved_state_bit_for_bit(tmp_path, name):
    training = TrainingConfig(optim=name, learning_rate=RATE, weight_decay=DECAY)

    def made():
        model = model_of()
        return model, OptimizerBuilder(training)(model)

    whole, begun, resumed = made(), made(), made()
    take_steps(whole[0], whole[1:], range(6))
    take_steps(begun[0], begun[1:], range(3))
    spec = optimizer_spec(name)
    state = optimizer_tensors(*begun, spec)
    saved = stored(tmp_path, {"model": model_tensors(begun[0]), "optimizer": state})
    restore_model(resumed[0], saved)
    restore_optimizer(*resumed, spec, saved, optimizer_settings(begun[1]))
    take_steps(resumed[0], resumed[1:], range(3, 6))
    for one, other in zip(whole[0].parameters(), resumed[0].parameters(), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("name", NAMES)
def test_planner_knows_the_bytes_of_the_state(name):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
    model = model_of(**sizes)
    training = TrainingConfig(optim=name, learning_rate=RATE)
    optimizer = OptimizerBuilder(training)(model)
    take_steps(model, [optimizer], range(1))
    kept = sum(
        tensor.nbytes
        for state in optimizer.state.values()
        for tensor in state.values()
        if torch.is_tensor(tensor) and tensor.dim()
    )
    shape = shape_of({**LLAMA, **sizes})
    planned = states(shape, Setting(length=64, optim=name)).optimizer
    # Adafactor's rows and columns are not counted: 1 % of a small model's weights.
    assert planned == pytest.approx(kept, rel=1e-9, abs=0.1 * shape.parameters * (planned == 0))


def test_schedule_free_counts_steps_that_zero3_would_repeat():
    training = {"optim": "schedule_free_adamw", **CONSTANT}
    with pytest.raises(ConfigError, match="ZeRO-3 updates a group in several steps"):
        from_mapping({**MINIMAL, "training": training, "compute": {"strategy": "zero3"}})


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero2"])
@pytest.mark.parametrize("name", NAMES)
def test_norms_of_whole_tensors_are_not_computed_on_shards(name, strategy):
    sections = {
        "compute": {"strategy": strategy},
        "training": {"optim": name, "lr_scheduler_type": "constant"},
    }
    if name not in WHOLE:
        from_mapping({**MINIMAL, **sections})
        return
    with pytest.raises(ConfigError, match=rf"training\.optim = '{name}': .* ranks have parts of"):
        from_mapping({**MINIMAL, **sections})
    fits = from_mapping({**MINIMAL, "training": sections["training"]})
    assert fits.conflict_with(strategy).startswith(f"training.optim {name}: it ")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"lr_scheduler_type": "cosine"}, "lr_scheduler_type is cosine"),
        ({"lr_scheduler_type": "constant", "adam_beta1": 0}, "adam_beta1 is 0"),
    ],
)
def test_schedule_free_rejects_what_its_average_cannot_use(settings, field):
    with pytest.raises(ConfigError, match=rf"'schedule_free_adamw': it .*, and training\.{field}"):
        from_mapping({**MINIMAL, "training": {"optim": "schedule_free_adamw", **settings}})


READ = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3}


@pytest.mark.parametrize("field", READ)
@pytest.mark.parametrize("name", ["adamw_torch", *NAMES])
def test_optimizer_rejects_the_settings_of_adam_that_it_does_not_read(name, field):
    """It counts as unread exactly if no update depends on it."""
    updated = []
    for value in (TrainingConfig.model_fields[field].default, READ[field]):
        training = TrainingConfig(optim=name, learning_rate=RATE, **{field: value})
        model = model_of()
        take_steps(model, [OptimizerBuilder(training)(model)], range(3))
        updated.append(list(model.parameters()))
    read = not all(one.equal(other) for one, other in zip(*updated, strict=True))
    content = {**MINIMAL, "training": {"optim": name, **CONSTANT, field: READ[field]}}
    if read:
        from_mapping(content)
        return
    with pytest.raises(ConfigError) as caught:
        from_mapping(content)
    (problem,) = caught.value.problems
    assert (problem.field, problem.value) == (f"training.{field}", str(READ[field]))
    assert problem.message == f"training.optim is {name}, which does not read it"
    assert "to its default" in problem.remedy


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("sgd", {"momentum": 1.5}, "momentum is 1.5: give a number above 0 and below 1"),
        ("sgd", {"nesterov": 1}, "nesterov is 1: give true or false"),
        ("adafactor", {"beta2_decay": 0.8}, "beta2_decay is 0.8: give a number above -inf and bel"),
        ("adafactor", {"d": 0.5}, "d is 0.5: give a number of at least 1"),
        ("lars", {"trust_coefficient": 0}, "trust_coefficient is 0: give a number above 0"),
        ("lion", {"beta2": 1}, "beta2 is 1: give a number above 0 and below 1"),
        ("muon", {"ns_steps": 0}, "ns_steps is 0: give a whole number from 1 to 99"),
        ("schedule_free_adamw", {"r": -1}, "r is -1: give a number of at least 0"),
        ("sgd", {"momentum": "high"}, "momentum is 'high': give a number above 0 and below 1"),
        ("adafactor", {"d": [2]}, "d is [2]: give a number of at least 1"),
        ("muon", {"ns_steps": True}, "ns_steps is True: give a whole number from 1 to 99"),
        ("schedule_free_adamw", {"r": "1"}, "r is '1': give a number of at least 0"),
        ("lion", {"momentum": 0.5}, "unexpected keyword argument 'momentum'"),
    ],
)
def test_options_out_of_range_are_rejected(name, options, problem):
    with pytest.raises(ConfigError, match=r"training\.optim_args") as caught:
        from_mapping({**MINIMAL, "training": {"optim": name, "optim_args": options, **CONSTANT}})
    (found,) = caught.value.problems
    assert problem in found.message
    assert "its options are (" in found.remedy


def test_optimizer_without_options_rejects_each():
    given = {"optim": "lamb", "optim_args": {"momentum": 0.5}, **CONSTANT}
    with pytest.raises(ConfigError, match="has no options, such as momentum") as caught:
        from_mapping({**MINIMAL, "training": given})
    assert caught.value.problems[0].remedy == "leave it out"


def test_options_reach_the_optimizer():
    settings = {"optim": "muon", "optim_args": {"momentum": 0.8, "ns_steps": 3}}
    optimizer = OptimizerBuilder(TrainingConfig(learning_rate=RATE, **settings))(model_of())
    matrices = [group for group in optimizer.param_groups if group["matrices"]]
    assert {(group["momentum"], group["ns_steps"]) for group in matrices} == {(0.8, 3)}


def checkpoint(bench, step):
    return Checkpoint.at(bench.workspace.checkpoints / f"step-{step:08d}")


def recipe(name, **settings):
    return {
        "training": {
            "optim": name,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 2,
            "save_steps": 1,
            "save_total_limit": 9,
            "eval_steps": 2,
            **settings,
        }
    }


@pytest.mark.slow
@selected.each("name", NAMES, few=("muon", "schedule_free_adamw"))
def test_resumed_run_ends_with_the_same_weights(make_bench, name):
    whole, resumed = (make_bench(run, **recipe(name)) for run in ("whole", "resumed"))
    whole.train_here()
    resumed.train_here(1, resume_from=whole.workspace.checkpoints / "step-00000003")
    assert weights_digest(resumed.workspace) == weights_digest(whole.workspace)
    losses = losses_of(whole.workspace)
    assert losses_of(resumed.workspace) == {at: loss for at, loss in losses.items() if at > 3}


def test_schedule_free_validates_and_exports_its_average(make_bench):
    bench = make_bench(**recipe("schedule_free_adamw"))
    training = bench.train_here()

    step = training.best().step
    saved, model = checkpoint(bench, step), exported(bench)
    state = saved.tensors("optimizer")
    for name, weight in saved.tensors("model").items():
        average = weight.lerp(state[f"{name}/z"], 1 - 1 / 0.9)
        assert model[name].equal(average)
        assert not model[name].equal(weight)
    # The export has left its weights in the module.
    assert validate(training.parts)[training.metric] == result_of(bench).best_score


@pytest.mark.slow
def test_validation_leaves_the_weights_of_schedule_free_alone(make_bench):
    often = make_bench("often", **recipe("schedule_free_adamw", eval_steps=1))
    once = make_bench("once", **recipe("schedule_free_adamw", eval_steps=6))
    often.train_here()
    once.train_here()
    found = (checkpoint(bench, 6).tensors("model") for bench in (often, once))
    assert all(one.equal(other) for one, other in zip(*map(dict.values, found), strict=True))


@pytest.fixture
def wide_bench(make_bench):
    """Make a bench with matrices large enough for 8-bit moments, on the CPU."""

    def make(name, optim, **settings):
        sections = recipe(optim, max_steps=24, save_steps=12, **settings)
        config = {**LLAMA, "hidden_size": 64, "intermediate_size": 128}
        return make_bench(name, **sections, model={"config": config}, compute={"device": "cpu"})

    return make


@pytest.mark.slow
def test_8_bit_adamw_trains_on_the_cpu_like_adamw(wide_bench):
    """Losses are within 2 % or 0.01 nats of those with 32-bit moments, and not the same."""
    benches = wide_bench("whole", "adamw_torch"), wide_bench("8bit", "adamw_bnb_8bit")
    for bench in benches:
        bench.train_here()
    whole, small = (losses_of(bench.workspace) for bench in benches)
    assert small[24] < 0.1 * small[1]
    assert small == pytest.approx(whole, rel=0.02, abs=0.01)
    assert small != whole
    kept = checkpoint(benches[1], 24).tensors("optimizer")
    assert torch.uint8 in {tensor.dtype for tensor in kept.values()}


@pytest.mark.slow
def test_8_bit_adamw_resumes_on_the_cpu_to_the_same_losses_and_weights(wide_bench):
    whole, resumed = (wide_bench(name, "adamw_bnb_8bit") for name in ("whole", "resumed"))
    whole.train_here()
    resumed.train_here(1, resume_from=whole.workspace.checkpoints / "step-00000012")
    assert losses_of(resumed.workspace) == {
        step: loss for step, loss in losses_of(whole.workspace).items() if step > 12
    }
    assert weights_digest(resumed.workspace) == weights_digest(whole.workspace)


def test_all_built_in_optimizers_are_tested():
    ours = {
        name
        for name in plugins.names(plugins.OPTIMIZERS)
        if plugins.is_ours(plugins.OPTIMIZERS, name)
    }
    assert ours == {*NAMES, "adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit"}
