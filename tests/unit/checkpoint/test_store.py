"""A checkpoint is whole, or it does not count."""

from __future__ import annotations

import json
import logging
import resource
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.shared.errors import StorageError
from steadytrain.components.train.checkpoint import CheckpointStore, newest
from steadytrain.components.train.checkpoint.manifest import (
    COMMIT,
    MANIFEST,
    STATE,
    CheckpointDamaged,
    read_manifest,
    verify,
)
from steadytrain.components.train.checkpoint.state import (
    model_tensors,
    optimizer_settings,
    optimizer_tensors,
    restore_model,
    restore_optimizer,
)
from steadytrain.components.train.checkpoint.store import (
    committed,
    load_state,
    load_tensors,
)

from support.training import LLAMA, VOCABULARY

PARTS = {
    "model": {"weight": torch.arange(12.0).reshape(3, 4), "count": torch.tensor(3)},
    "optimizer": {"weight/exp_avg": torch.ones(3, 4, dtype=torch.bfloat16)},
}


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def save(store, *steps, parts=PARTS):
    return [store.save(step, parts=parts, state={"step": step}, world_size=1) for step in steps]


def names(store):
    return sorted(path.name for path in store.folder.iterdir())


def test_what_was_saved_is_loaded(store):
    (size,) = save(store, 7)

    checkpoint = newest(store.folder)

    assert checkpoint == store.path(7)
    for part, tensors in PARTS.items():
        loaded = load_tensors(checkpoint, part)
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name], tensor)
    assert load_state(checkpoint) == {"step": 7}
    assert size == sum(
        path.stat().st_size for path in checkpoint.iterdir() if path.name not in {MANIFEST, COMMIT}
    )


def test_the_manifest_places_every_tensor_in_the_whole(store):
    save(store, 1)

    manifest = read_manifest(store.path(1))

    entries = {entry.name: entry for entry in manifest.tensors}
    assert entries.keys() == {"model/weight", "model/count", "optimizer/weight/exp_avg"}
    piece = entries["model/weight"].slices[0]
    assert (piece.file, piece.offsets, piece.shape) == ("model.safetensors", [0, 0], [3, 4])
    assert (manifest.step, manifest.world_size) == (1, 1)


def test_slices_of_several_files_make_up_a_tensor(store):
    """As another world size would have written it."""
    from safetensors.torch import save_file

    from steadytrain.components.shared.digest import file_digest
    from steadytrain.components.train.checkpoint.manifest import (
        FileEntry,
        Manifest,
        Slice,
        TensorEntry,
    )

    whole = torch.arange(12.0).reshape(3, 4)
    folder = store.path(5)
    folder.mkdir(parents=True)
    cuts = {"a.safetensors": ([0, 0], whole[:1]), "b.safetensors": ([1, 0], whole[1:])}
    for file, (_, part) in cuts.items():
        save_file({"model/weight": part.contiguous()}, folder / file)
    slices = [
        Slice(file=file, offsets=offsets, shape=list(part.shape))
        for file, (offsets, part) in cuts.items()
    ]
    files = [
        FileEntry(
            name=file, bytes=(folder / file).stat().st_size, digest=file_digest(folder / file)
        )
        for file in cuts
    ]
    entry = TensorEntry(name="model/weight", dtype="float32", shape=[3, 4], slices=slices)
    manifest = Manifest(step=5, world_size=2, tensors=[entry], files=files)
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    (folder / COMMIT).write_text(file_digest(folder / MANIFEST))

    assert torch.equal(load_tensors(folder, "model")["weight"], whole)


def test_there_may_be_none(tmp_path):
    assert newest(tmp_path / "nowhere") is None


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def remove(path):
    path.unlink()


def swap(path):
    """The same file of the checkpoint before."""
    shutil.copyfile(path.parents[1] / "step-00000001" / path.name, path)


@pytest.mark.parametrize("damage", [flip, truncate, remove, swap])
@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.safetensors", STATE, MANIFEST, COMMIT]
)
def test_a_damaged_checkpoint_is_named_set_aside_and_the_one_before_is_used(
    store, caplog, file, damage
):
    save(store, 1)
    other = {part: {name: item + 1 for name, item in own.items()} for part, own in PARTS.items()}
    save(store, 2, parts=other)
    damage(store.path(2) / file)

    with caplog.at_level(logging.WARNING):
        found = newest(store.folder)

    assert found == store.path(1)
    uncommitted = file == COMMIT and damage is remove
    assert uncommitted or str(store.path(2) / (MANIFEST if file == COMMIT else file)) in caplog.text
    assert uncommitted or "damaged-step-00000002" in names(store)
    assert committed(store.folder)[-1] == store.path(1) or uncommitted


def test_a_stale_manifest_is_found_out(store):
    """A whole older checkpoint's manifest and commit over newer files."""
    save(store, 1)
    save(store, 2, parts={**PARTS, "model": {"weight": torch.zeros(3, 4)}})
    for name in (MANIFEST, COMMIT):
        shutil.copyfile(store.path(1) / name, store.path(2) / name)

    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors"):
        verify(store.path(2))


def test_what_a_kill_leaves_never_counts_and_is_cleared(store):
    save(store, 1)
    partial = store.folder / ".partial-step-00000002"
    shutil.copytree(store.path(1), partial)
    unfinished = store.path(3)
    shutil.copytree(store.path(1), unfinished)
    (unfinished / COMMIT).unlink()

    assert newest(store.folder) == store.path(1)
    save(store, 4)
    assert not partial.exists()


def test_a_step_may_be_saved_again(store):
    save(store, 3)
    save(store, 3, parts={"model": {"weight": torch.zeros(2)}})

    assert torch.equal(load_tensors(store.path(3), "model")["weight"], torch.zeros(2))
    assert names(store) == ["step-00000003"]


def test_the_newest_and_the_best_are_kept(store):
    save(store, 1, 2, 3, 4)

    store.retain(best_step=2)

    assert names(store) == ["step-00000002", "step-00000003", "step-00000004"]


def test_a_full_disk_is_refused_and_harms_nothing(store):
    save(store, 1)
    large = {"model": {"weight": torch.zeros(100_000)}}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        with pytest.raises(StorageError, match="step-00000002 cannot be written") as error:
            save(store, 2, parts=large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    assert error.value.remedy
    assert newest(store.folder) == store.path(1)
    assert names(store) == ["step-00000001"]


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
def test_model_and_optimizer_come_back_by_name(store, tied):
    config = {**LLAMA, "tie_word_embeddings": tied}
    model, optimizer = trained(config, 1)
    save(
        store,
        2,
        parts={
            "model": model_tensors(model),
            "optimizer": optimizer_tensors(model, optimizer),
        },
    )
    settings = json.loads(json.dumps(optimizer_settings(optimizer)))
    again, fresh = trained(config, 2)

    restore_model(again, load_tensors(store.path(2), "model"))
    restore_optimizer(again, fresh, load_tensors(store.path(2), "optimizer"), settings)

    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert fresh.param_groups[0]["lr"] == 1e-3
    expected, found = optimizer_tensors(model, optimizer), optimizer_tensors(again, fresh)
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied


def test_another_models_checkpoint_is_refused():
    model, _ = trained(LLAMA, 1)
    wider, _ = trained({**LLAMA, "intermediate_size": 96}, 1)

    with pytest.raises(CheckpointDamaged, match=r"another model: model\.layers\.0\.mlp"):
        restore_model(wider, model_tensors(model))
