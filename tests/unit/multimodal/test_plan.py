"""The plan of a model of texts, images and columns: its memory is that of real steps."""

from __future__ import annotations

import pytest
import torch

from steadytrain.components.memory.live_tensors import LiveTensors
from steadytrain.components.multimodal.training import MultimodalClassification
from steadytrain.components.plan.networks import Trial


@pytest.mark.slow
def test_memory_is_that_of_real_steps(bench):
    made = bench()
    trial = Trial(made.config, made.data)
    live = LiveTensors(lambda *_: "all")
    with live:
        task = MultimodalClassification(made.config, made.data)
        model = task.build_model().train()
        batch = trial.batch(8)
        # Without padding, Transformers needs no mask; the plan counts one.
        batch["attention_mask"][0, -1] = 0
        for tensor in (*model.parameters(), *model.buffers(), *batch.values()):
            live.see(tensor, "all")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        for _ in range(2):
            live.begin()
            task.compute_loss(model, batch).total.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    planned = trial.peak(8, half=False).total
    assert planned == pytest.approx(live.peak, rel=0.01)
    assert batch["input_ids"].shape == (8, made.data.sequence_length)
