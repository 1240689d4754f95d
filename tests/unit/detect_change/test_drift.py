"""Drift on real text: functions from packages of the standard library, used as records."""

from __future__ import annotations

import ast
import functools
import json
import random
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from kfp import dsl

from steadytrain.components.detect_change.step import (
    js_distance,
    kfp_detect_change,
    moves,
    run,
    stability_index,
)
from steadytrain.components.preprocess.inputs import find_inputs
from steadytrain.components.preprocess.profile import profile_of
from steadytrain.components.shared.config import RetrainConfig, from_mapping
from steadytrain.components.shared.registry import INPUTS, PROFILE

LIBRARY = Path(sysconfig.get_path("stdlib"))


@functools.cache
def functions(package):
    """Return the source of every function in a package, one record each."""
    found = []
    for path in sorted((LIBRARY / package).rglob("*.py")):
        text = path.read_text("utf-8")
        lines = text.splitlines()
        nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
        found += ["\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes]
    return found


def write(path, records, label=None):
    rows = ({"text": text, **({"label": label(text)} if label else {})} for text in records)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def config_for(folder, task="causal_lm", **retrain):
    data = {"source": [str(folder / "data.jsonl")], "task": task}
    model = {"config": {"model_type": "llama"}}
    content = {"name": "tiny", "output": str(folder / "output"), "data": data, "model": model}
    return from_mapping({**content, "retrain": retrain})


def profile(folder, records, **options):
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "data.jsonl", records, **options)
    task = "sequence_classification" if options else "causal_lm"
    data = config_for(folder, task).data
    return profile_of(find_inputs(data), data, folder)


def compared(then, now):
    return {move.what: move for move in moves(then, now, RetrainConfig())}


def test_package_does_not_drift_from_itself(tmp_path):
    then = profile(tmp_path / "then", functions("asyncio"))
    found = compared(then, then)
    assert found.keys() == {"lengths", "words"}
    assert [move.value for move in found.values()] == pytest.approx([0, 0])
    assert not any(move.moved for move in found.values())


def test_halves_of_a_package_differ_only_by_chance(tmp_path):
    records = functions("asyncio")
    found = compared(
        profile(tmp_path / "then", records[::2]), profile(tmp_path / "now", records[1::2])
    )
    assert found["words"].value > 0
    assert not any(move.moved for move in found.values())


def test_another_package_has_drifted_words(tmp_path):
    found = compared(
        profile(tmp_path / "then", functions("asyncio")),
        profile(tmp_path / "now", functions("turtledemo")),
    )
    assert found["words"].moved
    assert found["words"].value > 2 * found["words"].limit


def test_truncated_records_have_drifted_lengths(tmp_path):
    records = functions("asyncio")
    found = compared(
        profile(tmp_path / "then", records),
        profile(tmp_path / "now", [text[:200] for text in records]),
    )
    assert found["lengths"].moved


def test_changed_label_shares_are_detected(tmp_path):
    records = functions("asyncio")

    def kind(text):
        return "private" if text.lstrip().startswith("def _") else "public"

    def rarely(text):
        return "private" if text.lstrip().startswith("def __") else "public"

    then = profile(tmp_path / "then", records, label=kind)
    assert not compared(then, then)["labels"].moved
    found = compared(then, profile(tmp_path / "now", records, label=rarely))
    assert found["labels"].moved
    assert not found["words"].moved


def test_few_records_are_too_few_to_tell(tmp_path):
    then = profile(tmp_path / "then", functions("asyncio"))
    for seed in range(5):
        few = random.Random(seed).sample(functions("asyncio"), 4)
        words = compared(then, profile(tmp_path / "now", few))["words"]
        assert words.value > words.limit
        assert not words.moved


def test_distance_matches_scipy():
    from scipy.spatial.distance import jensenshannon

    generator = np.random.default_rng(1)
    for _ in range(20):
        then, now = generator.integers(0, 50, (2, 64)).astype(float)
        assert js_distance(then, now) == pytest.approx(jensenshannon(then, now, base=2))
    apart = np.array([1.0, 0]), np.array([0, 1.0])
    assert js_distance(*apart) == pytest.approx(1)


def test_stability_index_matches_a_worked_example():
    """The shares 0.2, 0.3, 0.5 become 0.3, 0.3, 0.4. The expected value is computed by hand."""
    value = stability_index(np.array([20.0, 30, 50]), np.array([30.0, 30, 40]))
    assert value == pytest.approx(0.1 * np.log(1.5) + 0.1 * np.log(1.25))


@pytest.mark.slow
def test_parallel_profile_equals_the_serial_one(tmp_path, monkeypatch):
    alone = profile(tmp_path, functions("asyncio"))
    monkeypatch.setattr("steadytrain.components.preprocess.parallel.SMALL_BYTES", 0)
    assert profile(tmp_path, functions("asyncio")) == alone


@pytest.fixture
def champion(config, learned):
    """Register a champion that was trained on asyncio's functions, and return its configuration."""

    def make(**retrain):
        path = Path(config.data.source[0], "functions.jsonl")
        Path(config.data.source[0], "a.txt").unlink()
        write(path, functions("asyncio"))
        content = config.model_dump(mode="json")
        content["data"]["format"] = "jsonl"
        made = from_mapping({**content, "retrain": retrain})
        inputs = find_inputs(made.data)
        then = profile_of(inputs, made.data, path.parent)
        learned("champion", tags={INPUTS: inputs.digest(), PROFILE: then.model_dump_json()})
        return made, path

    return make


def test_drifted_new_data_are_reported_with_a_figure(champion):
    config, path = champion(when="drift")
    write(path, functions("turtledemo"))
    news = run(config)
    assert news.found
    assert "and have drifted: " in news.reason
    (words,) = (move for move in news.moves if move.what == "words")
    assert f"words {words.value:.3f} (Jensen-Shannon distance, limit 0.1)" in news.reason
    assert not list(Path(config.output).rglob(".*"))


@pytest.mark.parametrize(("when", "found"), [("new_data", True), ("drift", False)])
def test_similar_new_data_count_unless_only_drift_counts(champion, when, found):
    config, path = champion(when=when)
    write(path, functions("asyncio")[:-20])
    news = run(config)
    assert news.found is found
    assert "have not drifted: lengths 0.00" in news.reason
    assert news.reason.startswith("nothing new: ") is not found


def test_page_of_the_step_shows_each_figure(champion, tmp_path):
    config, path = champion()
    write(path, functions("turtledemo"))
    page = dsl.HTML(name="page", uri=str(tmp_path / "page.html"))
    parameters = {
        "config": config.to_yaml(),
        "overrides": {},
        "output": config.output,
        "job": "job-1",
    }
    assert kfp_detect_change(**parameters, page=page)
    text = Path(page.path).read_text()
    assert page.metadata["words_shift"] > 0.1
    for figure in (page.metadata["words_shift"], page.metadata["lengths_shift"]):
        assert f">{figure:.3f}</td>" in text


@pytest.mark.parametrize("tag", [{}, {PROFILE: "written by another version"}])
def test_champion_without_data_statistics_decides_nothing(config, learned, tag):
    learned("champion", tags={INPUTS: "others", **tag})
    news = run(config)
    assert news.found
    assert "it is not known whether they have drifted" in news.reason


def test_unusable_records_are_left_to_the_next_step_to_report(champion):
    config, path = champion(when="drift")
    path.write_text('{"other": 1}\n')
    news = run(config)
    assert news.found
    assert "no record" in news.reason
