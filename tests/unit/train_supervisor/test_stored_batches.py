"""Batch settings that earlier versions stored field by field read back."""

from __future__ import annotations

import json

import pytest

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.events.stream import from_json, to_json
from steadytrain.components.sizing.batch import plan_batch
from steadytrain.components.sizing.learned import Learned
from steadytrain.components.train.recovery.history import History

LOWERED = BatchSettings(
    1, gradient_checkpointing=True, snapshot=False, strategy="fsdp", offload="all"
)
STARTED = (
    '{"schema_version": 2, "generation": 1, "event": "attempt_started", "level": "info", '
    '"job_id": "tiny", "time": 1763870400.0, "attempt": 2, "world_size": 2, '
    '"micro_batch_size": 1, "gradient_accumulation_steps": 4, "resumed_from_step": 6, '
    '"inputs": "ab12", "gradient_checkpointing": true, "device": "NVIDIA L4", '
    '"snapshot": false, "nodes": 1, "strategy": "fsdp", "offload": "all", "decisions": [], '
    '"digest": "577562b4ea60a93c07089fa878ee8eac4ddf5013fb83abb75eddb79475c74619"}'
)
LOWERING = (
    '{"schema_version": 2, "generation": 1, "event": "decision_made", "level": "info", '
    '"job_id": "tiny", "time": 1763870390.0, "attempt": 1, "failure_class": "gpu_oom", '
    '"action": "retry_changed", "reason": "gpu_oom: CPU offload", "delay_seconds": 0.0, '
    '"micro_batch_size": 1, "gradient_checkpointing": true, "snapshot": false, '
    '"strategy": "fsdp", "offload": "all", "fallback": "CPU offload", "skipped_batch": null, '
    '"learning_rate_scale": 1.0, "nodes": null, "on_demand": false, '
    '"digest": "edc167392444a320a21cae3fc712ff4c427a19a7fb449f1e6f408665c050a4ad"}'
)
RETRYING = (
    '{"schema_version": 2, "generation": 1, "event": "decision_made", "level": "info", '
    '"job_id": "tiny", "time": 1763870395.0, "attempt": 1, "failure_class": "network", '
    '"action": "retry", "reason": "nothing changes", "delay_seconds": 0.0, '
    '"micro_batch_size": null, "gradient_checkpointing": false, "snapshot": true, '
    '"strategy": "", "offload": "none", "fallback": "", "skipped_batch": null, '
    '"learning_rate_scale": 1.0, "nodes": null, "on_demand": false, '
    '"digest": "c5db7e44c5bf5091541e01c2f11cbf5533fdaaf1e99fd10d90956216c202684f"}'
)
WITHOUT_STRATEGY = (
    '{"event": "decision_made", "level": "info", "job_id": "tiny", "time": 1.0, "attempt": 1, '
    '"failure_class": "gpu_oom", "action": "retry_changed", "reason": "smaller", '
    '"micro_batch_size": 2}'
)


def test_events_of_an_earlier_version_are_read():
    history = History.of(map(from_json, (LOWERING, RETRYING, STARTED)))
    assert history.limit.batch == LOWERED
    assert [item.batch for item in history.decisions] == [LOWERED, None]
    (attempt,) = history.attempts
    assert attempt.plan.settings == LOWERED
    assert str(attempt.plan) == (
        "1 x 4, activation checkpointing, no snapshot in host memory, fsdp, offload all"
    )
    assert attempt.plan.global_batch_size == 8


@pytest.mark.parametrize("line", [STARTED, LOWERING])
def test_stored_fields_keep_their_names(line):
    before = json.loads(line)
    written = json.loads(to_json(from_json(line), job_id="tiny"))
    assert {name: written[name] for name in written if name in before} == {
        name: value
        for name, value in before.items()
        if name not in ("schema_version", "generation", "digest")
    }


def test_decision_without_batch_settings_has_no_micro_batch():
    written = json.loads(to_json(from_json(RETRYING), job_id="tiny"))
    assert written["micro_batch_size"] is None
    assert written.keys() - {"entry", "sequence_length"} <= json.loads(RETRYING).keys()
    assert from_json(json.dumps(written)) == from_json(RETRYING)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_decision_from_before_strategies_keeps_the_strategy(strategy):
    plan = plan_batch(8, 2).changed(strategy=strategy)
    limited = plan.limited_to(from_json(WITHOUT_STRATEGY).batch)
    assert (limited.micro_batch_size, limited.settings.strategy) == (2, strategy)


def test_attempt_from_before_strategies_was_replicated():
    line = json.loads(STARTED)
    del line["strategy"], line["offload"]
    assert from_json(json.dumps(line)).batch.strategy == "ddp"


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (
            '{"schema_version": 1, "micro_batch_size": 2, "gradient_checkpointing": true, '
            '"strategy": "fsdp", "offload": "all"}',
            BatchSettings(2, gradient_checkpointing=True, strategy="fsdp", offload="all"),
        ),
        (
            '{"schema_version": 1, "micro_batch_size": 2, "gradient_checkpointing": false}',
            BatchSettings(2, strategy=""),
        ),
    ],
)
def test_settings_learned_by_an_earlier_version_are_read(tmp_path, text, limit):
    path = tmp_path / "learned.json"
    path.write_text(text)
    learned = Learned.load(path)
    assert learned.limit == limit
    learned.save(path)
    assert Learned.load(path) == learned
