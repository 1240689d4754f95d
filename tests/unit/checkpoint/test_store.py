"""A checkpoint is complete, or it does not count."""

from __future__ import annotations

import json
import math
import resource
import threading

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.shared.errors import StorageError
from steadytrain.components.train.checkpoint import (
    Checkpoint,
    CheckpointDamaged,
    CheckpointStore,
    newest,
)
from steadytrain.components.train.checkpoint.cadence import Retention
from steadytrain.components.train.checkpoint.manifest import COMMIT
from steadytrain.components.train.checkpoint.snapshot import (
    HostMemory,
    Region,
    cut,
    encode,
    in_place,
)
from steadytrain.components.train.checkpoint.state import (
    model_tensors,
    optimizer_settings,
    optimizer_tensors,
    restore_model,
    restore_optimizer,
)
from steadytrain.components.train.optimizers import ADAMW

from support.checkpoints import PARTS, names, same, save, shifted, stored
from support.training import LLAMA, VOCABULARY


def test_saved_state_is_loaded(store, address):
    manifest = save(store, 7)

    checkpoint = newest(address)

    assert checkpoint == store.path(7)
    assert all(same(checkpoint.tensors(part), PARTS[part]) for part in PARTS)
    assert checkpoint.state() == {"step": 7}
    assert (checkpoint.rank_state(0), checkpoint.rank_state(1)) == ({"rank": 0}, None)
    assert sorted(checkpoint.storage.list()) == sorted(manifest.names)
    sizes = {name: len(checkpoint.storage.read(name)) for name in manifest.names}
    assert manifest.bytes == sum(sizes.values()) - sizes[COMMIT] - sizes[manifest.name]


def test_safetensors_reads_the_files(folder):
    """Test every number type, an empty tensor, and a tensor without dimensions."""
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]
    kinds += [torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn]
    tensors = {str(kind): torch.arange(5).to(kind) for kind in kinds}
    tensors |= {"empty": torch.empty(0, 3), "one": torch.tensor(2.5)}
    tensors["transposed"] = torch.arange(6.0).reshape(2, 3).T
    store = CheckpointStore(folder, keep=1)
    save(store, 1, parts={"model": tensors})

    (file,) = store.path(1).storage.folder.glob("*.model.safetensors")

    read = {name.removeprefix("model/"): item for name, item in load_file(file).items()}
    assert same(read, {name: item.contiguous() for name, item in tensors.items()})
    assert same(newest(folder).tensors("model"), tensors)


def test_writing_in_place_gives_the_same_bytes_as_a_copy():
    generator = torch.Generator().manual_seed(0)
    tensors = {"wide": torch.rand(3, 5, generator=generator).T, "one": torch.tensor(2.5)}
    tensors |= {"half": torch.ones(7).bfloat16(), "flags": torch.ones(3).bool()}
    tensors |= {"empty": torch.empty(0, 3), "large": torch.rand(3_000_000, generator=generator)}
    pieces = cut(tensors, 0, 1)
    whole = b"".join(encode(HostMemory().take("model", pieces)))
    assert b"".join(encode(in_place("model", pieces))) == whole


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_slices_of_all_ranks_form_the_whole_tensor(folder, world_size):
    """Test tensors of unequal sizes and fewer rows than ranks.

    Each byte is written once, and every rank writes an equal part.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 33), (1, 5), (64,), (), (0, 4), (3, 2, 2), (501, 2)]
    tensors = {str(shape): torch.rand(shape, generator=generator) for shape in shapes}
    store = CheckpointStore(folder, keep=1)

    manifest = save(store, 1, parts={"model": tensors}, world_size=world_size)

    assert same(newest(folder).tensors("model"), tensors)
    written = [0] * world_size
    for entry in manifest.tensors:
        for piece in entry.slices:
            rank = int(piece.file.partition("-rank-")[2][:4])
            written[rank] += 4 * int(torch.tensor(piece.shape).prod())
    total = sum(4 * tensor.numel() for tensor in tensors.values())
    widest_row = 4 * 33
    assert sum(written) == total
    assert max(written) - min(written) <= 2 * widest_row
    assert [newest(folder).rank_state(rank) for rank in range(world_size)] == [
        {"rank": rank} for rank in range(world_size)
    ]


def test_rank_reads_only_files_with_its_own_slices(folder):
    store = CheckpointStore(folder, keep=2)
    parts = {"model": {"weight": torch.arange(16.0).reshape(4, 4)}}
    manifest = save(store, 10, parts=parts, world_size=2)
    (entry,) = manifest.tensors
    first, second = entry.slices
    (folder / "step-00000010" / second.file).unlink()

    values = torch.zeros(math.prod(first.shape))
    Checkpoint.at(folder / "step-00000010").copy_into("model", {"weight": Region(values, 0, 16)})
    assert values.tolist() == [float(number) for number in range(len(values))]
    with pytest.raises(CheckpointDamaged, match="is missing"):
        Checkpoint.at(folder / "step-00000010").tensors("model")


def test_empty_store_has_no_checkpoint(address):
    assert newest(address) is None


def test_partial_save_of_a_killed_process_is_ignored_and_cleared(store, address):
    """Leftovers of a killed rank, of a save without a commit, and of a half-finished removal."""
    save(store, 1)
    save(store, 3)
    store.path(3).storage.delete(COMMIT)
    store.path(4).storage.write("abc-rank-0000.json", b"{}")
    assert newest(address) == store.path(1)

    store.begin()

    assert store.storage.folders() == ["step-00000001"]


def test_upload_that_was_killed_is_cleared(store, address):
    if not address.startswith("s3"):
        return
    client = store.storage.client
    client.create_multipart_upload(Bucket="bucket", Key="some/run/step-00000009/x.safetensors")

    store.begin()

    assert "Uploads" not in client.list_multipart_uploads(Bucket="bucket")


def test_large_uploads_are_multipart_with_checksums(store, address):
    if not address.startswith("s3"):
        return
    large = {"model": {"weight": torch.rand(3, 2_000_000)}}
    save(store, 1, parts=large)

    assert same(newest(address).tensors("model"), large["model"])
    storage = store.path(1).storage
    name = next(name for name in storage.list() if name.endswith(".model.safetensors"))
    found = storage.client.head_object(Bucket="bucket", Key=f"some/run/step-00000001/{name}")
    assert found["ETag"].strip('"').endswith("-3")


def test_step_is_committed_once(store, address):
    save(store, 3)

    with pytest.raises(StorageError, match="committed by another process"):
        save(store, 3, parts=shifted(1))

    assert same(newest(address).tensors("model"), PARTS["model"])


@pytest.mark.slow
def test_fence_is_checked_right_before_the_commit(address):
    seen = []

    def fence():
        seen.append({name.rpartition("-")[2] for name in store.path(1).storage.list()})
        raise StorageError("the lease is another's")

    store = CheckpointStore(address, keep=2, fence=fence)
    with pytest.raises(StorageError, match="another's"):
        save(store, 1)

    assert "manifest.json" in seen[0]
    assert newest(address) is None


def test_missing_rank_is_reported(store, monkeypatch):
    given_up = threading.Event()
    given_up.set()

    with pytest.raises(StorageError, match=r"abc-rank-0000\.json was not written"):
        store.commit(1, "abc", 2, b"{}", given_up=given_up)


@pytest.mark.slow
def test_newest_the_best_and_every_nth_are_kept(address):
    store = CheckpointStore(address, keep=Retention(newest=2, every=4))
    for step in range(1, 11):
        store.retain(save(store, step), best_step=3 if step > 3 else 0)

    assert names(address) == [f"step-{step:08d}" for step in (3, 4, 8, 9, 10)]
    assert store.storage.folders() == names(address)


def test_full_disk_is_reported_and_harms_no_checkpoint(folder):
    store = CheckpointStore(folder, keep=2)
    save(store, 1)
    large = {"model": {"small": torch.zeros(9)}, "optimizer": {"weight": torch.zeros(100_000)}}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        with pytest.raises(StorageError, match="step-00000002") as error:
            save(store, 2, parts=large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    assert error.value.remedy
    assert newest(folder) == store.path(1)
    assert not list((folder / "step-00000002").iterdir())


def trained(config, seed):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, vocab_size=VOCABULARY))
    frozen, *_ = model.parameters()
    frozen.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [item for item in model.parameters() if item.requires_grad], lr=1e-3 * seed
    )
    for _ in range(2):
        ids = torch.randint(VOCABULARY, (1, 8))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("tied", [False, True])
def test_model_and_optimizer_are_restored_by_name(folder, tied):
    store = CheckpointStore(folder, keep=1)
    config = {**LLAMA, "tie_word_embeddings": tied}
    model, optimizer = trained(config, 1)
    save(
        store,
        2,
        parts={
            "model": model_tensors(model),
            "optimizer": optimizer_tensors(model, optimizer, ADAMW),
        },
    )
    settings = json.loads(json.dumps(optimizer_settings(optimizer)))
    again, fresh = trained(config, 2)

    restore_model(again, newest(folder))
    restore_optimizer(again, fresh, ADAMW, newest(folder), settings)

    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert fresh.param_groups[0]["lr"] == 1e-3
    expected, found = (
        optimizer_tensors(model, optimizer, ADAMW),
        optimizer_tensors(again, fresh, ADAMW),
    )
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied


def test_checkpoint_of_another_model_is_rejected(tmp_path):
    model, _ = trained(LLAMA, 1)
    wider, _ = trained({**LLAMA, "intermediate_size": 96}, 1)
    shorter, _ = trained({**LLAMA, "num_hidden_layers": 1}, 1)
    saved = stored(tmp_path, {"model": model_tensors(model)})

    with pytest.raises(CheckpointDamaged, match=r"another model: model\.layers\.0\.mlp"):
        restore_model(wider, saved)
    with pytest.raises(CheckpointDamaged, match=r"another model: model\.layers\.1\."):
        restore_model(shorter, saved)


def test_weight_that_is_not_contiguous_is_restored(tmp_path):
    model = torch.nn.Linear(5, 3)
    saved = stored(tmp_path, {"model": model_tensors(model)})
    other = torch.nn.Linear(5, 3)
    other.weight = torch.nn.Parameter(torch.zeros(5, 3).T)

    restore_model(other, saved)

    assert not other.weight.is_contiguous()
    assert other.weight.equal(model.weight)
