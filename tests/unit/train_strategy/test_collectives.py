"""What ranks exchange in a step, and in how many pieces."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.train.strategy.replicated import (
    SummedBatchNorm,
    bucket_mb,
    learns_in_buffers,
    synchronize,
)

from support.collectives import recorded
from support.training import LLAMA

# More than 2 MB of gradients, so more than one bucket.
MODEL = {**LLAMA, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3}


@pytest.mark.slow
def test_replicas_exchange_gradients_once_per_step(tmp_path):
    once, thrice = (Counter(recorded(tmp_path, "ddp", MODEL, times)) for times in (1, 3))
    assert once == thrice
    assert once["c10d::broadcast_"] == 0
    # Three more calls are for the step's counts, its loss, and which parameters had a gradient.
    assert once["c10d::allreduce_"] > 3 + 1


@pytest.mark.parametrize(
    ("megabytes", "bucket"), [(0.1, 1), (8, 1), (36, 4), (199, 24), (200, None), (4000, None)]
)
def test_small_models_are_exchanged_in_about_eight_pieces(megabytes, bucket):
    with torch.device("meta"):
        module = torch.nn.Linear(int(megabytes * 2**18), 1, bias=False)
        module.frozen = torch.nn.Parameter(torch.empty(2**28), requires_grad=False)
    assert bucket_mb(module) == bucket


def test_only_buffers_of_the_models_state_are_sent_to_other_ranks():
    rotary = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA, vocab_size=64))
    assert list(rotary.buffers())
    assert not learns_in_buffers(rotary)
    assert learns_in_buffers(torch.nn.Sequential(torch.nn.BatchNorm1d(2)))


class _Own(torch.nn.BatchNorm2d):
    def forward(self, values):
        return 2 * super().forward(values)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batch_normalization_is_synchronized_or_named(device):
    import timm  # takes seconds
    from timm.layers import BatchNormAct2d

    network = timm.create_model("test_resnet")
    model = torch.nn.Sequential(
        network, BatchNormAct2d(network.num_classes), _Own(network.num_classes)
    )
    model[1].running_mean.fill_(-0.5)
    images = torch.randn(2, 3, 64, 64)

    def answers():
        with torch.no_grad():
            found = model[0](images)
            return model[1:](found[..., None, None])

    model.eval()
    names, before = list(model.state_dict()), answers()
    shared, own = synchronize(model, torch.device(device))
    assert list(model.state_dict()) == names
    assert torch.equal(answers(), before)
    kind = SummedBatchNorm if device == "cpu" else torch.nn.SyncBatchNorm
    layers = [item for item in model.modules() if isinstance(item, kind)]
    assert f"{len(layers)} layers of batch normalization" in shared
    assert len(layers) > 2
    assert "_Own) take their statistics from the micro-batch of each rank alone" in own
    assert synchronize(torch.nn.Linear(1, 1), torch.device(device)) == []


@pytest.mark.slow
def test_next_layers_weights_are_prefetched(tmp_path):
    names = recorded(tmp_path, "fsdp", MODEL, 1)
    middle = names.index("FSDP::pre_backward")
    for turn, begun in (("forward", names[:middle]), ("backward", names[middle:])):
        for layer in range(3):
            gathered = begun.index(f"FSDP::all_gather (model.layers.{layer})")
            assert gathered < begun.index(f"FSDP::pre_{turn} (model.layers.{layer})")
