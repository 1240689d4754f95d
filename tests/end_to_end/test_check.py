"""`steadytrain check` passes what a run wrote, and names each damaged file or tensor."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from steadytrain.components.evaluate.soundness import check
from steadytrain.components.shared.errors import BadInput

from support.command import TINY_LM
from support.odd import call


@pytest.fixture(scope="module")
def run(shared_steadytrain):
    """The folder of a finished run."""
    strategy = ("training.save_strategy=best", "training.save_steps=null")
    done = shared_steadytrain.run("causal-lm", *TINY_LM, *strategy)
    assert done.code == 0, done.err
    (folder,) = done.runs
    return folder


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the output folder, to damage."""
    shutil.copytree(run.parent.parent, tmp_path / "output", symlinks=True)
    return tmp_path / "output" / "runs" / run.name


def newest(folder):
    return sorted((folder / "checkpoints").glob("step-*"))[-1]


def weights_of(checkpoint):
    (path,) = checkpoint.glob("*.model.safetensors")
    return path


def test_what_the_run_wrote_is_sound(run):
    for subject in (newest(run), run / "model"):
        found = check(str(subject))
        assert found.problems == []
        assert found.skipped == []
        assert any("the reloaded model's" in line for line in found.passed)


def test_flipped_byte_of_a_checkpoint_is_found(copy):
    path = weights_of(newest(copy))
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    problems = check(str(newest(copy))).problems
    assert problems[0].startswith(f"{path.name}: its content has changed")
    assert any(line.startswith("model/") for line in problems)
    done = call("check", str(newest(copy)), folder=copy.parent)
    assert done.code == 1
    assert f"BAD      {path.name}" in done.out


@pytest.mark.parametrize("what", ["truncated", "missing"])
def test_lost_bytes_of_a_checkpoint_are_found(copy, what):
    path = weights_of(newest(copy))
    if what == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-100])
    (problem, *_) = check(str(newest(copy))).problems
    assert problem.startswith(f"{path.name}: {'is missing' if what == 'missing' else 'has '}")


def test_checkpoint_in_a_folder_with_another_name_is_not_taken_for_a_model(run, tmp_path):
    shutil.copytree(newest(run), tmp_path / "copied")
    with pytest.raises(BadInput, match="not in a folder with the name of its step"):
        check(str(tmp_path / "copied"))


def recommit(checkpoint, path):
    """Give a changed file the digest that a careful attacker would."""
    (manifest,) = checkpoint.glob("*-manifest.json")
    content = json.loads(manifest.read_text())
    (entry,) = [item for item in content["files"] if item["name"] == path.name]
    entry["digest"] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(content))
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
    (checkpoint / "COMMIT").write_text(f"{digest}  {manifest.name}\n")


def change_a_value(path, value):
    """Overwrite one float32 of a file of tensors in place. Return the tensor's name."""
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = next(name for name in header if name.endswith("model.norm.weight"))
    start = 8 + size + header[name]["data_offsets"][0]
    content[start : start + 4] = torch.tensor([value]).numpy().tobytes()
    path.write_bytes(content)
    return name.removeprefix("model/")


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_folder_of_checkpoints_is_not_taken_for_a_model(run, below):
    with pytest.raises(BadInput, match="has checkpoints below it"):
        check(str(run / below))


def test_nan_with_a_matching_digest_is_found(copy):
    checkpoint = newest(copy)
    name = change_a_value(weights_of(checkpoint), float("nan"))
    recommit(checkpoint, weights_of(checkpoint))
    (problem,) = check(str(checkpoint)).problems
    assert problem.startswith("model/")
    assert name in problem
    assert "1 of" in problem


def test_other_weights_with_a_matching_digest_give_another_loss(copy):
    checkpoint = newest(copy)
    change_a_value(weights_of(checkpoint), 1e4)
    recommit(checkpoint, weights_of(checkpoint))
    (problem,) = check(str(checkpoint)).problems
    assert "validation loss is" in problem


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_changed_file_beside_the_weights_is_found(copy, name):
    path = copy / "model" / name
    path.write_bytes(path.read_bytes().replace(b" ", b"  ", 1))
    assert check(str(copy / "model")).problems == [
        f"{name}: differs from what the train step wrote"
    ]
    path.unlink()
    assert check(str(copy / "model")).problems == [f"{name}: is missing"]


def test_damaged_model_is_found(copy):
    path = copy / "model" / "model.safetensors"
    whole = path.read_bytes()

    def problem(content):
        path.write_bytes(content)
        (found, *_) = check(str(copy / "model")).problems
        return found

    flipped = bytearray(whole)
    flipped[-5] ^= 1
    assert "model.safetensors: differs from what the train step wrote" in problem(flipped)
    assert "model.safetensors: cannot be read" in problem(whole[:-100])
    path.write_bytes(whole)
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, path, {"format": "pt"})
    assert f"{name}: 1 of" in problem(path.read_bytes())
    path.write_bytes(whole)
    assert check(str(copy / "model")).problems == []


def test_missing_shard_of_a_model_is_named(copy, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(copy / "model")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert check(str(tmp_path / "sharded")).problems == []
    shard = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    shard.unlink()
    (problem,) = check(str(tmp_path / "sharded")).problems
    assert problem.startswith(f"{shard.name}: is missing")


def test_what_is_neither_is_refused(tmp_path):
    for subject in (tmp_path / "none", tmp_path):
        done = call("check", str(subject), folder=tmp_path)
        assert done.code == 2
        assert str(subject) in done.err


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_model_that_does_not_load_is_no_traceback(copy, name):
    path = copy / "model" / name
    path.write_bytes(path.read_bytes()[:-40])
    # As of a run before digests of these files were recorded.
    record = copy / "records" / "train.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"files": {}}))
    (problem,) = check(str(copy / "model")).problems
    assert problem.startswith("model: does not load")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", ["[1, 2]", '{"weight_map": [1], "architectures": 3}', "{", "7"])
def test_json_of_another_shape_beside_a_model_is_named(tmp_path, name, content):
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / name).write_text(content)
    (problem,) = check(str(tmp_path)).problems
    assert problem.startswith(f"{name}: is not")


def test_class_that_loads_no_model_is_skipped(tmp_path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architectures": ["logging"]}')
    found = check(str(tmp_path))
    assert found.problems == []
    assert "loading: config.json names no class of Transformers" in found.skipped


def test_folder_that_goes_away_meanwhile_is_no_bug(tmp_path, monkeypatch):
    def vanish(folder):
        raise FileNotFoundError(2, "No such file or directory", str(folder / "part"))

    monkeypatch.setattr("steadytrain.components.evaluate.soundness.check_model", vanish)
    with pytest.raises(BadInput, match="part was removed while it was checked"):
        check(str(tmp_path))
