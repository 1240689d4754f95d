"""Code beside a model runs only if the configuration pins it, and nothing waits for stdin."""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM

from steadytrain.components.preprocess.model import find_model
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.shared.records import DataRecord, SideRecord
from steadytrain.components.shared.remote_code import code_digest
from steadytrain.components.tasks.base import OpenTask
from steadytrain.components.tasks.encoding.tokens import load_tokenizer

from support.canary import change, make_canary
from support.tiny import make_tokenizer


@pytest.fixture(autouse=True)
def nobody_answers(monkeypatch, tmp_path):
    def asked(*_):
        raise AssertionError("something waits for stdin")

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )


@pytest.fixture
def canary(tmp_path):
    return tmp_path / "canary"


@pytest.fixture
def configure(tmp_path):
    def make(base, **model):
        return from_mapping(
            {
                "name": "small",
                "output": str(tmp_path / "output"),
                "data": {"source": ["data.jsonl"], "sequence_length": 32},
                "model": {"base": str(base), **model},
            }
        )

    return make


@pytest.fixture
def build(tmp_path):
    def make(config):
        make_tokenizer(100).save_pretrained(tmp_path / "data" / "tokenizer")
        data = DataRecord(
            folder=str(tmp_path / "data"),
            fingerprint="data",
            task="causal_lm",
            sides={"train": SideRecord(shards=[], rows=1, documents=1)},
            test_records="test.arrow",
            split_digest="split",
            sequence_length=32,
            tokenizer="tokenizer",
        )
        return OpenTask(config, data)

    return make


def test_model_that_needs_code_is_rejected_by_default(tmp_path, canary, configure, build):
    folder = make_canary(tmp_path / "model", canary)
    config = configure(folder)
    for attempt in (
        lambda: find_model(config),
        lambda: build(config).training.build_model(),
        lambda: build(config).packager.load_exported(folder),
    ):
        with pytest.raises(BadInput, match=r"model\.trust_remote_code is false") as caught:
            attempt()
        assert "modeling_canary.py" in caught.value.message
        assert f"model.revision to the commit of a hub model, or else to {code_digest(folder)}" in (
            caught.value.remedy
        )
    assert not canary.exists()


def test_optional_model_code_is_not_loaded(tmp_path, canary, configure, build):
    folder = make_canary(tmp_path / "model", canary, model_type="llama")
    config = configure(folder)
    find_model(config)
    assert type(build(config).training.build_model()) is LlamaForCausalLM
    assert type(build(config).packager.load_exported(folder)["model"]) is LlamaForCausalLM
    assert not canary.exists()


def test_pinned_code_runs_and_is_exported(tmp_path, canary, configure, build):
    folder = make_canary(tmp_path / "model", canary)
    with pytest.raises(BadInput, match=r"model\.revision = None") as caught:
        find_model(configure(folder, trust_remote_code=True))
    assert f"set model.revision to {code_digest(folder)}" in caught.value.remedy
    assert not canary.exists()

    config = configure(folder, trust_remote_code=True, revision=code_digest(folder))
    find_model(config)
    assert not canary.exists()
    task = build(config)
    model = task.training.build_model()
    assert type(model).__name__ == "CanaryForCausalLM"
    assert canary.exists()

    task.packager.export(model, tmp_path / "export")
    loaded = task.packager.load_exported(tmp_path / "export")["model"]
    assert type(loaded).__name__ == "CanaryForCausalLM"


def test_pinned_code_that_has_changed_does_not_run(tmp_path, canary, configure, build):
    folder = make_canary(tmp_path / "model", canary)
    config = configure(folder, trust_remote_code=True, revision=code_digest(folder))
    with (folder / "modeling_canary.py").open("a") as code:
        code.write("# another version\n")
    for attempt in (lambda: find_model(config), lambda: build(config).training.build_model()):
        with pytest.raises(BadInput, match=r"model\.revision = 'sha256:.*must pin the code"):
            attempt()
    assert not canary.exists()


def test_pinned_code_pins_no_other_code(tmp_path, canary, configure, build):
    base = make_canary(tmp_path / "model", tmp_path / "base-canary")
    config = configure(base, trust_remote_code=True, revision=code_digest(base))
    other = make_canary(tmp_path / "other", canary)
    with pytest.raises(BadInput, match=r"modeling_canary\.py is not part of the code"):
        build(config).packager.load_exported(other)
    assert not canary.exists()


@pytest.mark.parametrize(
    "reference", ["other/repository--modeling.Model", "/tmp/modeling.Model", "../x.Model"]
)
def test_code_from_another_repository_is_never_pinned(
    tmp_path, canary, configure, build, reference
):
    folder = make_canary(tmp_path / "model", canary)
    change(folder / "config.json", auto_map={"AutoConfig": reference})
    config = configure(folder, trust_remote_code=True, revision=code_digest(folder))
    for attempt in (lambda: find_model(config), lambda: build(config).training.build_model()):
        with pytest.raises(BadInput, match="auto_map refers to"):
            attempt()


def test_tokenizer_never_runs_code(tmp_path, canary):
    folder = make_canary(tmp_path / "model", canary)
    code = (folder / "modeling_canary.py").read_text()
    (folder / "tokenization_canary.py").write_text(f"{code}\nclass Canary:\n    pass\n")
    change(
        folder / "tokenizer_config.json",
        tokenizer_class="CanaryTokenizer",
        auto_map={"AutoTokenizer": [None, "tokenization_canary.Canary"]},
    )
    assert load_tokenizer(folder).get_vocab()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match="no tokenizer can be read") as caught:
        load_tokenizer(folder)
    assert "tokenizer code is never run" in caught.value.remedy
    assert not canary.exists()


@pytest.mark.parametrize("revision", [None, "main", "v1.0", "a1b2c3d", "sha256:" + "0" * 64])
def test_hub_model_is_pinned_by_its_commit(configure, revision):
    with pytest.raises(ConfigError, match=r"model\.revision = .*a branch or tag can move"):
        configure("hub:some/model", trust_remote_code=True, revision=revision)
    configure("hub:some/model", trust_remote_code=True, revision="0123456789" * 4)
    configure("hub:some/model", revision=revision)


def test_trust_needs_a_base_model(configure):
    with pytest.raises(ConfigError, match=r"model\.trust_remote_code = True: it applies only to"):
        from_mapping(
            {
                "name": "small",
                "data": {"source": ["a"]},
                "model": {"config": {"model_type": "llama"}, "trust_remote_code": True},
            }
        )
