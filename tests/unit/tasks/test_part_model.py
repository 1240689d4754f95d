"""One part of a model of several data sets, as a model of its own and as the base of others."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.multi_task import MultiTaskClassification, extract_part
from steadytrain.components.tasks.sequence_classification import SequenceClassification

from support.disks import small_file_system
from support.odd import call
from support.training import VOCABULARY, write_tokenizer
from support.weight_digests import BERT

LABELS = ["mood/bad", "mood/good", "topic/art", "topic/law/tax", "topic/sport"]
ROBERTA = {**BERT, "model_type": "roberta", "pad_token_id": 1}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


def write_model(folder, fields=BERT, labels=LABELS):
    torch.manual_seed(0)
    names = {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}
    config = AutoConfig.for_model(**{**fields, "vocab_size": VOCABULARY, **names})
    config.pad_token_id = 1
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model.eval()


@pytest.fixture
def whole(tmp_path):
    write_model(tmp_path / "whole")
    return tmp_path / "whole"


@pytest.mark.parametrize("fields", [BERT, ROBERTA, GPT2], ids=["bert", "roberta", "gpt2"])
def test_part_answers_as_its_rows_of_the_whole(tmp_path, fields):
    model = write_model(tmp_path / "whole", fields)
    assert extract_part(tmp_path / "whole", "topic", tmp_path / "topic") == [
        "art",
        "law/tax",
        "sport",
    ]
    part, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "topic", output_loading_info=True
    )
    assert not any(report.values()), report
    assert part.config.id2label == {0: "art", 1: "law/tax", 2: "sport"}
    ids = AutoTokenizer.from_pretrained(tmp_path / "topic")("w5 w9 w7", return_tensors="pt")
    inputs = {name: ids[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        expected = model(**inputs).logits[:, 2:]
        assert torch.allclose(part.eval()(**inputs).logits, expected, atol=1e-6)


def test_unknown_part_and_plain_classifier_are_errors(tmp_path, whole):
    with pytest.raises(BadInput, match="no part 'moods'") as caught:
        extract_part(whole, "moods", tmp_path / "new")
    assert caught.value.remedy == "one of mood, topic"
    write_model(tmp_path / "plain", labels=["a", "b"])
    with pytest.raises(BadInput, match="no part 'mood'") as caught:
        extract_part(tmp_path / "plain", "mood", tmp_path / "new")
    assert "multi_task" in caught.value.remedy
    assert not (tmp_path / "new").exists()


def test_adapters_and_folders_in_use_are_errors(tmp_path, whole):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(BadInput, match="is not empty"):
        extract_part(whole, "mood", tmp_path / "used")
    with pytest.raises(BadInput, match="/ is not empty"):
        extract_part(whole, "mood", Path("/"))
    (whole / "adapter_config.json").touch()
    with pytest.raises(BadInput, match="adapters without their base model"):
        extract_part(whole, "mood", tmp_path / "new")


def test_model_without_its_head_is_an_error(tmp_path, whole):
    weights = load_file(whole / "model.safetensors")
    kept = {name: item for name, item in weights.items() if not name.startswith("classifier")}
    save_file(kept, whole / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"lacks 2 weights of the model, such as classifier\.bias"):
        extract_part(whole, "mood", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_interrupted_extraction_is_repeated(tmp_path, whole, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            extract_part(whole, "mood", tmp_path / "mood")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole"]
    extract_part(whole, "mood", tmp_path / "mood")
    assert (tmp_path / "mood" / "tokenizer_config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mood", "whole"]


@pytest.mark.parametrize(
    "options",
    [
        "size=64k",  # The weights do not fit.
        "nr_inodes=3",  # No file for the weights.
        "nr_inodes=4",  # One for the weights, none for the tokenizer.
        "nr_inodes=5",
    ],
)
def test_full_disk_is_an_error_and_nothing_is_left(tmp_path, whole, options):
    with small_file_system(tmp_path / "disk", options) as disk:
        with pytest.raises(BadInput, match=f"{disk}/mood cannot be written: No space") as caught:
            extract_part(whole, "mood", disk / "mood")
        assert "free space" in caught.value.remedy
        assert not list(disk.iterdir())


@pytest.mark.parametrize("dangling", [True, False])
def test_part_is_written_through_a_link(tmp_path, whole, dangling):
    (tmp_path / "elsewhere").mkdir()
    if not dangling:
        (tmp_path / "elsewhere" / "mood").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "mood")
    extract_part(whole, "mood", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert AutoConfig.from_pretrained(tmp_path / "elsewhere" / "mood").num_labels == 2
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["mood"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "link", "whole"]


def test_link_to_itself_is_an_error_and_nothing_is_left(tmp_path, whole):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(BadInput, match="loop cannot be written: "):
        extract_part(whole, "mood", tmp_path / "loop")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loop", "whole"]


def test_folder_in_the_model_is_an_error(tmp_path, whole):
    (tmp_path / "link").symlink_to(whole)
    before = sorted(whole.iterdir())
    for target in (whole, whole / "sub", whole / "sub" / "sub", tmp_path / "link" / "sub"):
        with pytest.raises(BadInput, match=f"{target} is in the model's own folder") as caught:
            extract_part(whole, "mood", target)
        assert "outside" in caught.value.remedy
    with pytest.raises(BadInput, match="in the model's own folder"):
        extract_part(tmp_path / "link", "mood", whole / "sub")
    assert sorted(whole.iterdir()) == before


def test_command_writes_the_part(tmp_path, whole):
    done = call("extract", "whole", "mood", "mood", "--json", folder=tmp_path)
    assert done.code == 0, done
    assert json.loads(done.out) == {"folder": "mood", "part": "mood", "labels": ["bad", "good"]}
    assert AutoConfig.from_pretrained(tmp_path / "mood").num_labels == 2


def built(folder, labels):
    """Return the model of a run on data with these classes that starts from a folder."""
    several = all("/" in label for label in labels)
    parts = {label.partition("/")[0]: {"source": ["unused"]} for label in labels}
    config = from_mapping(
        {
            "name": "tiny",
            "data": {"task": "multi_task", "parts": parts}
            if several
            else {"task": "sequence_classification", "source": ["unused"]},
            "model": {"base": str(folder)},
            "gate": {"max_slice_regression": 0.02},
        }
    )
    data = SimpleNamespace(
        labels=labels,
        sequence_length=16,
        split_digest="0" * 64,
        tokenizer="whole",
        path=lambda name: folder,
    )
    task = (MultiTaskClassification if several else SequenceClassification)(config, data)
    torch.manual_seed(1)
    return task.build_model()


@pytest.mark.parametrize(
    ("labels", "keeps"),
    [
        (LABELS, True),
        (["mood/bad", "mood/good", "topic/art", "topic/law/tax", "other/x"], False),
        (["mood/bad", "mood/good", "topic/art"], False),
        (["a", "b", "c", "d", "e"], False),
        (["a", "b"], False),
    ],
)
def test_whole_is_a_base_whose_head_is_new_if_the_classes_differ(whole, labels, keeps):
    model = built(whole, labels)
    old = AutoModelForSequenceClassification.from_pretrained(whole)
    assert model.bert.encoder.layer[1].output.dense.weight.equal(
        old.bert.encoder.layer[1].output.dense.weight
    )
    assert model.config.id2label == dict(enumerate(labels))
    assert model.classifier.out_features == len(labels)
    rows = min(len(labels), len(LABELS))
    same = model.classifier.weight[:rows].equal(old.classifier.weight[:rows])
    assert same == keeps
    assert model.classifier.weight.isfinite().all()
    assert built(whole, labels).classifier.weight.equal(model.classifier.weight)


def test_part_is_a_base_with_its_head(tmp_path, whole):
    extract_part(whole, "topic", tmp_path / "topic")
    part = AutoModelForSequenceClassification.from_pretrained(tmp_path / "topic")
    model = built(tmp_path / "topic", ["art", "law/tax", "sport"])
    assert model.classifier.weight.equal(part.classifier.weight)
