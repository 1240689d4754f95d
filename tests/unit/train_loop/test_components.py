"""Training components of another package: hooks, state in checkpoints, and their failures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.memory.states import states
from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput, ConfigError, StorageError
from steadytrain.components.train import step
from steadytrain.components.train.checkpoint import Checkpoint
from steadytrain.components.train.failures import PluginFailed
from steadytrain.components.train.loop.halving import least_memory
from steadytrain.components.train.loop.validation import validate

from support.plugins import install_example, write_plugin
from support.training import LLAMA, VOCABULARY, exported, result_of, weights_digest

EACH_STEP = {"save_steps": 1, "save_total_limit": 9, "eval_steps": 2}
BOTH = {"ema": {"decay": 0.5}, "grad_norms": {}}
COMPONENT = """
import torch
from steadytrain.components.shared.errors import StorageError
from steadytrain.components.techniques.base import TrainingComponent


class Plugin(TrainingComponent):
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return install_example(tmp_path_factory.mktemp("example"))


@pytest.fixture
def example(site, monkeypatch):
    monkeypatch.syspath_prepend(site)
    yield
    forget("steadytrain_example")


@pytest.fixture
def add(tmp_path, monkeypatch):
    """Install a component with this body, and return its name."""
    added = []

    def write(body, name="odd"):
        text = COMPONENT + "\n".join(f"    {line}" for line in body.strip("\n").split("\n"))
        site = write_plugin(tmp_path / name, plugins.COMPONENTS, name, text)
        monkeypatch.syspath_prepend(site)
        added.append(f"{name}_package")
        return name

    yield write
    forget(*added)


def forget(*packages):
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


def checkpoint(bench, step):
    return Checkpoint.at(bench.workspace.checkpoints / f"step-{step:08d}")


def same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.slow
def test_average_follows_the_weights_of_each_step(make_bench, example):
    bench = make_bench(training={**EACH_STEP, "components": {"ema": {"decay": 0.5}}})
    training = bench.train_here()

    for done in range(2, 7):
        before, now = (checkpoint(bench, at).tensors("component-ema") for at in (done - 1, done))
        for name, weight in checkpoint(bench, done).tensors("model").items():
            expected = before[f"{name}/average"].lerp(weight, 0.5)
            assert now[f"{name}/average"].equal(expected), (done, name)
    assert training.progress.step == 6


def test_score_of_a_step_is_that_of_the_model_exported_for_it(make_bench, example):
    bench = make_bench(training={**EACH_STEP, "components": {"ema": {"decay": 0.9}}})
    training = bench.train_here()

    chosen = training.best()
    average = checkpoint(bench, chosen.step).tensors("component-ema")
    weights = checkpoint(bench, chosen.step).tensors("model")
    model = exported(bench)
    assert all(tensor.equal(average[f"{name}/average"]) for name, tensor in model.items())
    assert not any(tensor.equal(weights[name]) for name, tensor in model.items())
    # The export has left its weights in the module.
    assert validate(training.parts)[training.metric] == result_of(bench).best_score


@pytest.mark.slow
def test_components_change_nothing_that_is_learned(make_bench, example):
    plain = make_bench("plain", training=EACH_STEP)
    watched = make_bench("watched", training={**EACH_STEP, "components": BOTH})
    plain.train_here()
    watched.train_here()

    for part in ("model", "optimizer"):
        assert same(checkpoint(plain, 6).tensors(part), checkpoint(watched, 6).tensors(part))
    assert "components" in checkpoint(watched, 6).state()
    assert checkpoint(plain, 6).state()["components"] == {}
    assert {entry.name.partition("/")[0] for entry in checkpoint(plain, 6).manifest.tensors} == {
        "model",
        "optimizer",
    }


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 2, 5])
def test_resumed_components_have_the_state_of_an_undisturbed_run(make_bench, example, at):
    settings = {"training": {**EACH_STEP, "components": BOTH}}
    undisturbed, resumed = make_bench("undisturbed", **settings), make_bench("resumed", **settings)
    undisturbed.train_here()

    resumed.train_here(1, resume_from=undisturbed.workspace.checkpoints / f"step-{at:08d}")

    assert weights_digest(resumed.workspace) == weights_digest(undisturbed.workspace)
    ends = [checkpoint(bench, 6) for bench in (undisturbed, resumed)]
    assert same(*(end.tensors("component-ema") for end in ends))
    states = [end.state()["components"] for end in ends]
    assert states[0] == states[1]
    assert len(states[0]["grad_norms"]["state"]["norms"]) == 6


def test_monitor_writes_its_observations(make_bench, example):
    bench = make_bench(training={**EACH_STEP, "components": {"grad_norms": {}}})
    bench.train_here()

    content = json.loads((bench.workspace.folder / "grad-norms.json").read_text())
    assert len(content["norms"]) == 6
    assert min(content["norms"]) > 0
    assert content["metrics"].keys() >= {"loss"}


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({}, BOTH, r"components none, and the configuration has ema \(average\); grad_norms"),
        (BOTH, {}, r"components ema \(average\); grad_norms, and the configuration has none"),
        ({"grad_norms": {}}, BOTH, "components grad_norms, and"),
    ],
)
def test_checkpoint_with_the_state_of_other_components_is_rejected(
    make_bench, example, before, now, message
):
    first = make_bench("first", training={**EACH_STEP, "components": before})
    first.train_here()
    second = make_bench("second", training={**EACH_STEP, "components": now})

    with pytest.raises(BadInput, match=message) as caught:
        second.train_here(1, resume_from=first.workspace.checkpoints / "step-00000003")
    assert "give the run another name" in caught.value.remedy


def test_checkpoint_of_a_version_without_components_is_resumed(make_bench, monkeypatch):
    first, second = make_bench("first"), make_bench("second")
    first.train_here()
    whole = Checkpoint.state
    monkeypatch.setattr(
        Checkpoint,
        "state",
        lambda self: {key: value for key, value in whole(self).items() if key != "components"},
    )

    second.train_here(1, resume_from=first.workspace.checkpoints / "step-00000003")

    assert weights_digest(second.workspace) == weights_digest(first.workspace)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def begin(self, context): 1 / 0", r"begin\(\): ZeroDivisionError: division by zero"),
        ("def after_update(self, update): [][update.step]", r"after_update\(\): IndexError"),
        ("def before_validation(self): raise OSError('No space left on device')", "OSError: No"),
        ("def after_validation(self, metrics): metrics['f1']", r"after_validation\(\): KeyError"),
        ("def state_dict(self): return {'values': {1, 2}}", r"state_dict\(\): TypeError: .* set"),
        ("def tensors(self): return {'mean': {'w': torch.ones(1)}}", "'w', which is not the name"),
        ("exports = 'mean'", r"exports = 'mean', but tensors\(\) has \[\]"),
        (
            "def begin(self, context): self.weights = context.weights\n"
            "def tensors(self):\n"
            "    return {'mean': {name: item.sum() for name, item in self.weights.items()}}",
            r"tensors\(\): ValueError: 'mean' of .* has shape \[\]; it must have \[\d",
        ),
    ],
)
def test_failing_component_is_named(make_bench, add, body, message):
    bench = make_bench(training={"components": {add(body): {}}})
    with pytest.raises(PluginFailed, match=f"training component 'odd' failed in .*{message}"):
        bench.train_here()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("MemoryError()", MemoryError),
        ("torch.OutOfMemoryError('CUDA out of memory')", torch.OutOfMemoryError),
        ("StorageError('the disk is full')", StorageError),
    ],
)
def test_failure_that_a_retry_can_fix_keeps_its_class(make_bench, add, error, kind):
    name = add(f"def after_update(self, update): raise {error}")
    bench = make_bench(training={"components": {name: {}}})
    with pytest.raises(kind):
        bench.train_here()


def test_step_with_a_component_is_not_repeated(make_bench, add, monkeypatch):
    """Nothing could take back what the component has counted, for example in hooks of its own."""
    monkeypatch.setenv("FAULT_STEP", "2")
    monkeypatch.setenv("FAULT_PHASE", "forward")
    components = {add("def after_step(self, step): pass"): {}}
    bench = make_bench(task="support.faults:Exhausted", training={"components": components})
    with pytest.raises(torch.OutOfMemoryError):
        bench.train_here()


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ({"swa": {}}, "no installed package has swa in steadytrain.training_components"),
        ({"ema": {"decay": 2}}, r"training.components.ema = \{'decay': 2\}: .*decay is 2; it must"),
        ({"ema": {"decy": 0.9}}, "unexpected keyword argument 'decy'"),
        ({"ema": 0.9}, r"training.components.ema = 0.9: .*valid dictionary"),
        ({"../ema": {}}, "String should match pattern"),
    ],
)
def test_bad_component_is_rejected_before_training(example, components, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(configured(components))


def test_refusal_of_an_option_names_the_known_ones(example):
    with pytest.raises(ConfigError, match=r"its options are \(\*, decay: float = 0.999\)"):
        from_mapping(configured({"ema": {"decy": 0.9}}))


def test_two_components_that_replace_the_weights_are_rejected(example, add):
    other = add("exports = 'mean'")
    with pytest.raises(ConfigError, match="ema and odd all replace the exported weights"):
        from_mapping(configured({"ema": {}, other: {}}))


def test_checking_a_configuration_imports_no_torch(site):
    content = json.dumps(configured(BOTH))
    program = (
        "import sys, json\n"
        "from steadytrain.components.shared.config import from_mapping\n"
        f"config = from_mapping(json.loads({content!r}))\n"
        "assert config.training.components['ema'] == {'decay': 0.5}\n"
        "assert 'steadytrain_example.ema' in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(site)}, check=True)


def test_run_has_another_identity_with_other_components_or_another_order(example):
    contents = [configured({}), configured({"ema": {}}), configured({"ema": {"decay": 0.5}})]
    contents.append({**configured({}), "training": {"order": "shortest_first"}})
    assert len({from_mapping(content).run_id for content in contents}) == len(contents)
    one, other = dict(BOTH), dict(reversed(BOTH.items()))
    assert from_mapping(configured(one)).run_id == from_mapping(configured(other)).run_id


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 1), ("fsdp", 4), ("zero2", 4)])
def test_plans_count_what_components_keep(example, strategy, ranks):
    shape = shape_of({**LLAMA, "vocab_size": VOCABULARY})
    plain, averaged = (from_mapping(configured(found)).training for found in ({}, BOTH))
    before, after = (
        states(
            shape,
            Setting(length=48, strategy=strategy, ranks=4, weight_copies=training.weight_copies),
        )
        for training in (plain, averaged)
    )
    assert after.optimizer - before.optimizer == 4 * shape.parameters // ranks


def test_memory_of_an_average_is_what_the_formula_says(make_bench, example):
    plain, averaged = (
        make_bench(name, training={"max_steps": 1, "components": found}).train_here()
        for name, found in (("plain", {}), ("averaged", {"ema": {}}))
    )
    stored = averaged.store.path(1).tensors("component-ema").values()
    held = sum(tensor.numel() * tensor.element_size() for tensor in stored)
    assert least_memory(averaged.parts) - least_memory(plain.parts) == held


def test_changed_code_of_a_component_trains_again(make_bench, add):
    name = add("def after_update(self, update): self.seen = update")
    bench = make_bench(training={"components": {name: {}}})
    before = step._key(bench.config, bench.data)
    assert step._key(bench.config, bench.data) == before

    module = Path(sys.modules[f"{name}_package"].__file__)
    module.write_text(f"{module.read_text()}\n# changed\n")

    assert step._key(bench.config, bench.data) != before


def configured(components):
    return {
        "name": "tiny",
        "data": {"source": ["unused"]},
        "model": {"config": {"model_type": "llama"}},
        "training": {"components": components},
    }
