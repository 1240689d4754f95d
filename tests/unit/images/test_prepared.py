"""Folders of images through preprocessing: what is kept, what is split, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from steadytrain.components.images.encoder import ImageEncoder, scale_of
from steadytrain.components.preprocess.data_card import show
from steadytrain.components.shared.arrow_files import open_batches
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import ConfigError, DataError
from steadytrain.components.tasks.checks import check_task

from support.pictures import digits, image_config, noise, prepared, write_folders, written


def rows_of(data, side):
    """Return the pixels and labels of a side."""
    found = []
    for shard in data.sides[side].shards:
        for stored in open_batches(data.path(shard)):
            found += stored.checked().to_pylist()
    return [(row["pixels"], data.labels[row["label"]]) for row in found]


def quarantine(data):
    lines = data.path("quarantine.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def card(data):
    return json.loads(data.path("card.json").read_text())


def test_folder_of_digits_is_prepared(tmp_path):
    images, labels = (part[:400] for part in digits())
    _, data = prepared(write_folders(tmp_path / "digits", images, labels))
    assert data.labels == [str(number) for number in range(10)]
    rows = rows_of(data, "train") + rows_of(data, "validation")
    assert len(rows) + data.sides["test"].documents == 400
    known = {(image.tobytes(), str(label)) for image, label in zip(images, labels, strict=True)}
    assert {*rows} <= known
    seen = np.stack([np.frombuffer(pixels, np.uint8) for pixels, _ in rows_of(data, "train")]) / 255
    mean, deviation = scale_of(data)
    assert mean == pytest.approx([seen.mean()], abs=1e-6)
    assert deviation == pytest.approx([seen.std()], abs=1e-6)
    found = card(data)
    assert found["facts"]["sizes of the files"] == f"8 x 8 ({len(seen)})"
    assert found["facts"]["modes of the files"] == f"L ({len(seen)})"
    page = data.path("card.html").read_text()
    assert page.count("data:image/png;base64,") == 9


def test_equal_pixels_are_one_record_whatever_their_file(tmp_path):
    folder = write_folders(tmp_path / "images", noise(60), [number % 2 for number in range(60)])
    gray, colored = noise(1, seed=7)[0], np.stack([*noise(3, seed=8)], -1)
    for name, content in {
        "a.png": written(gray),
        "b.bmp": written(gray, "BMP"),
        "c.png": written(np.stack([gray] * 3, -1)),
        "d.png": written(colored),
        "e.tiff": written(colored, "TIFF"),
    }.items():
        (folder / "0" / name).write_bytes(content)
    _, data = prepared(folder)
    counts = Counter(entry["reason"] for entry in quarantine(data))
    assert counts == {"exact_duplicate": 3}
    assert sum(side.documents for side in data.sides.values()) == 62


def test_same_picture_in_two_classes_is_a_conflict(tmp_path):
    folder = write_folders(tmp_path / "images", noise(60), [number % 2 for number in range(60)])
    twice = noise(1, seed=9)[0]
    (folder / "0" / "twice.png").write_bytes(written(twice))
    (folder / "1" / "again.bmp").write_bytes(written(twice, "BMP"))
    _, data = prepared(folder)
    found = [(entry["reason"], entry["source"][-9:]) for entry in quarantine(data)]
    assert {*found} == {("conflicting_label", "twice.png"), ("conflicting_label", "again.bmp")}


def test_broken_images_are_counted_by_reason(tmp_path):
    folder = write_folders(tmp_path / "images", noise(96), [number % 2 for number in range(96)])
    whole = written(noise(1, 64, seed=5)[0])
    broken = {
        "0/empty.png": b"",
        "0/cut.jpg": whole[: len(whole) // 2],
        "1/text.jpg": b"no image",
        "1/large.png": written(noise(1, 40, seed=6)[0]),
        "loose.png": written(noise(1, seed=10)[0]),
    }
    for name, content in broken.items():
        (folder / name).write_bytes(content)
    (folder / "0" / "notes.txt").write_text("no image")
    _, data = prepared(folder, "data.images.max_pixels=1500")
    found = {entry["source"].rpartition("images/")[2]: entry for entry in quarantine(data)}
    assert {name: entry["reason"] for name, entry in found.items()} == {
        "0/empty.png": "broken_image",
        "0/cut.jpg": "huge_image",
        "1/text.jpg": "broken_image",
        "1/large.png": "huge_image",
        "loose.png": "missing_field",
    }
    assert found["0/empty.png"]["detail"] == "the file is empty"
    assert "40 x 40 pixels" in found["1/large.png"]["detail"]
    assert card(data)["left_out"] == {"files with a suffix that is not read": 1}
    with pytest.raises(DataError, match="broken_image"):
        prepared(folder, "data.max_bad_share=0.04", "data.images.max_pixels=1500")


def test_folders_with_the_name_of_a_side_are_kept(tmp_path):
    images = noise(300)
    folder = tmp_path / "images"
    for side, start in {"train": 0, "val": 100, "test": 200}.items():
        labels = ["dev" if number % 2 else "prod" for number in range(100)]
        write_folders(folder / side, images[start : start + 100], labels)
    _, data = prepared(folder)
    assert {side: item.documents for side, item in data.sides.items()} == {
        "train": 100,
        "validation": 100,
        "test": 100,
    }
    assert data.labels == ["dev", "prod"]


def test_property_of_files_that_gives_the_class_away_is_reported(tmp_path):
    small, large = noise(100), noise(100, 9)
    folder = write_folders(tmp_path / "images", small, ["cat"] * 100)
    write_folders(folder, large, ["dog"] * 100)
    _, data = prepared(folder)
    (warning,) = [text for text in card(data)["warnings"] if "gives its class away" in text]
    assert warning.startswith("the size of an image's file")


@pytest.mark.slow
def test_bytes_in_a_table_are_images(tmp_path):
    import pyarrow.parquet as pq

    images, labels = (part[:200] for part in digits())
    rows = [
        {"picture": {"bytes": written(image), "path": "x.png"}, "what": f"n{label}"}
        for image, label in zip(images, labels, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "digits.parquet")
    columns = ["data.columns.image=picture", "data.columns.label=what"]
    _, data = prepared(tmp_path / "digits.parquet", *columns)
    assert data.labels == [f"n{number}" for number in range(10)]
    assert sum(side.documents for side in data.sides.values()) == 200


def write_table(folder, names, labels):
    lines = [f"{name},{label}" for name, label in zip(names, labels, strict=True)]
    path = folder / "table.csv"
    path.write_text("\n".join(["file,what", *lines]) + "\n")
    return path


NAMED = ["data.columns.image=file", "data.columns.label=what"]


def test_table_names_the_files(tmp_path):
    images, labels = (part[:200] for part in digits())
    folder = tmp_path / "images"
    write_folders(folder / "all", images, ["flat"] * 200)
    (tmp_path / "outside.png").write_bytes(written(noise(1)[0]))
    (folder / "inside.png").symlink_to(tmp_path / "outside.png")
    (folder / "notes.md").write_text("no image")
    names = [f"all/flat/{number:05}.png" for number in range(200)]
    lost = ["all/no.png", "../outside.png", "inside.png", str(tmp_path / "outside.png"), "notes.md"]
    table = write_table(folder, [*names, *lost], [*labels, *[0] * len(lost)])
    for source in (table, folder):
        _, data = prepared(source, *NAMED, f"output={tmp_path / source.name}-out")
        assert sum(side.documents for side in data.sides.values()) == 200
        reasons = [entry["reason"] for entry in quarantine(data)]
        assert reasons == ["missing_file"] * len(lost)
        rows = rows_of(data, "train") + rows_of(data, "validation")
        known = {(one.tobytes(), str(label)) for one, label in zip(images, labels, strict=True)}
        assert {*rows} <= known
        # Images that a table names are not left out, but other files are.
        assert sum(card(data)["left_out"].values()) == (0 if source == table else 2)


def test_changed_file_that_a_table_names_is_read_again(tmp_path):
    images = noise(60)
    folder = write_folders(tmp_path / "images", images, ["all"] * 60)
    names = [f"all/{number:05}.png" for number in range(60)]
    table = write_table(folder, names, [number % 2 for number in range(60)])
    _, first = prepared(table, *NAMED)
    _, again = prepared(table, *NAMED)
    assert again.folder == first.folder
    (folder / names[0]).write_bytes(written(noise(1, seed=3)[0]))
    _, changed = prepared(table, *NAMED)
    assert changed.fingerprint != first.fingerprint


def test_first_records_are_shown_without_their_pixels(tmp_path):
    folder = write_folders(tmp_path / "images", noise(9), ["a", "b", "c"] * 3)
    shown = show(image_config(folder), 2)
    assert [one.rows[0][0].pieces[0].text for one in shown] == ["8 x 8 pixels, mode L"] * 2
    table = write_table(folder, ["a/00000.png", "b/00001.png"], ["x", "y"])
    shown = show(image_config(table, *NAMED), 2)
    assert [one.rows[0][0].pieces[0].text for one in shown] == ["8 x 8 pixels, mode L"] * 2


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (noise(50), ["a"] * 50, "1 different labels"),
        ([b""] * 50, ["a", "b"] * 25, "defective"),
        (noise(4), ["a", "a", "b", "b"], "side"),
    ],
)
def test_folder_that_teaches_nothing_is_refused(tmp_path, images, labels, message):
    with pytest.raises(DataError, match=message):
        prepared(write_folders(tmp_path / "images", images, labels))


def test_empty_folder_is_refused(tmp_path):
    folder = tmp_path / "images"
    (folder / "cat").mkdir(parents=True)
    with pytest.raises(Exception, match="no file found there"):
        prepared(folder)


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["model.framework=lightgbm"], "model.framework"),
        (["model.adapter.kind=lora"], "model.adapter"),
        (["data.columns.text=words"], "data.columns.text"),
        (["data.sequence_length=64"], "data.sequence_length"),
        (["model.config.hidden_sizes=3"], "model.config.hidden_sizes"),
        (["training.augmentation.swap=0.1"], "training.augmentation"),
        (["training.r_drop.weight=1"], "training.r_drop"),
    ],
)
def test_setting_that_does_not_go_with_images_is_refused(tmp_path, overrides, field):
    with pytest.raises(ConfigError, match=field):
        check_task(image_config(tmp_path, *overrides))


@pytest.mark.parametrize(
    "override", ["data.images.size=32", "data.columns.image=file", "data.images.color=gray"]
)
def test_settings_of_images_are_not_for_texts(override):
    with pytest.raises(ConfigError, match=r"data\.(images|columns\.image)"):
        load("causal-lm", [override])


def test_encoder_reads_what_a_folder_gives():
    encoder = ImageEncoder(image_config(Path("x")).data)
    image = noise(1)[0]
    content = encoder.read({"image": written(image), "label": "cat", "path": "cat/1.png"})
    assert content.label == "cat"
    assert content.text == '{"size": "8 x 8", "mode": "L"}'
    attachment = pa.array([content.attachment], pa.large_binary())
    table = pa.table({"content": [content.text], "label": ["cat"], "attachment": attachment})
    assert encoder.test_columns(table)["pixels"].to_pylist() == [image.tobytes()]


def test_first_records_are_of_as_many_classes_as_there_are(tmp_path):
    labels = [number // 300 for number in range(1200)]
    folder = write_folders(tmp_path / "images", noise(1200), labels)
    config = image_config(folder)
    first = show(config, 8)
    assert [one.label for one in first] == ["0", "1", "2", "3"] * 2
    assert len({one.source for one in first}) == 8
    assert first == show(config, 8)
