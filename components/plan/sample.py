"""How much there is to train on before the data are prepared: from their first records.

The records are read and checked as the preprocess step does it. Nothing is downloaded, and the
sample is bounded, so that it takes about a second, and the same data give the same numbers.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from steadytrain.components.preprocess.chunks import Chunk
from steadytrain.components.preprocess.formats import read_files
from steadytrain.components.preprocess.inputs import Inputs, inputs_of, read_dataset
from steadytrain.components.preprocess.model import make_tokenizer, with_template
from steadytrain.components.preprocess.reading import encoders_by_part
from steadytrain.components.preprocess.shards import best_fit
from steadytrain.components.preprocess.sources import SourceFile
from steadytrain.components.preprocess.split import (
    SIDES,
    TRAIN,
    hash_position,
    held_out,
    identity_in,
    side_of_split,
    sides_at,
    stratify,
)
from steadytrain.components.preprocess.survey import check_sides
from steadytrain.components.preprocess.validate import Checked, check, no_records
from steadytrain.components.shared.class_names import in_order
from steadytrain.components.shared.config import DataConfig, RunConfig
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import BadInput, DataError, StorageError
from steadytrain.components.shared.model_source import resolve_model
from steadytrain.components.shared.paths import local_path
from steadytrain.components.shared.quantities import size
from steadytrain.components.shared.records import Side
from steadytrain.components.sizing.length import Sampled
from steadytrain.components.tasks.base import open_encoder
from steadytrain.components.tasks.encoding.base import (
    Content,
    Encoder,
    Fitted,
    class_reader,
    has_label_sets,
)
from steadytrain.components.tasks.encoding.fields import Defect

CHARACTERS_OF_A_TOKEN: Final = 4
"""Assumed where the tokenizer is not on this machine. It fits English text."""
_FILES: Final = 10
_READ_BYTES: Final = 8 << 20
_RECORDS: Final = 4_000
_CHARACTERS: Final = 2_000_000
"""Limits on what is read, and on the records and characters that are encoded."""
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass
class _Read:
    """Good records of the training side and of what it shares with others, and how many bytes.

    given: held-out sides that the data give.
    bytes: of the files that were read, or parts of them. total: of all files.
    """

    good: list[Checked] = field(default_factory=list)
    records: int = 0
    given: set[Side] = field(default_factory=set)
    bytes: float = 0.0
    total: float = 0.0
    complete: bool = True

    def add(self, chunk: Chunk, data: DataConfig, encoder: Encoder, column: str | None) -> None:
        """Count a chunk. What it gives to a held-out side is not trained on."""
        if chunk.given in ("validation", "test"):
            self.given.add(chunk.given)
            return
        batch = getattr(chunk, "batch", None)
        self.bytes += chunk.size or (0 if batch is None else batch.nbytes)
        for _, _, row in chunk.rows():
            self.records += 1
            try:
                if not isinstance(row, Defect):
                    self.good.append(check(row, data, encoder, column))
            except Defect:
                continue


def sample(config: RunConfig, data_bytes: int | None = None) -> Sampled:
    """Return how many rows the training side will have, and how long they are.

    Rows and tokens are None if the data or their task cannot be sampled; `source` says why.

    Args:
        data_bytes: of all data, if the files here are a sample of them.
    """
    try:
        return _sampled(config, data_bytes)
    except (BadInput, DataError, StorageError) as error:
        return Sampled(None, None, f"the data were not counted: {error.message}")


def _sampled(config: RunConfig, data_bytes: int | None) -> Sampled:
    encoder = open_encoder(config.data)
    if encoder.tokenizer is None:
        return Sampled(None, None, "the records of this task are not text")
    inputs = inputs_of(config)
    if away := _elsewhere(inputs):
        return Sampled(None, None, f"the data were not counted: {away} is not on this machine")
    with tempfile.TemporaryDirectory() as scratch:
        read = _read(config, encoder, inputs, Path(scratch))
        if not read.records:
            raise no_records(config.data)
        if not read.good:
            return Sampled(None, None, f"none of the first {read.records:,} records can be used")
        found = _count(config, encoder, read, Path(scratch))
    if data_bytes is None or found.rows is None or not read.total:
        return found
    times = data_bytes / read.total
    rows, documents = (max(1, round(count * times)) for count in (found.rows, found.documents))
    source = f"{rows:,} sequences by {size(data_bytes)} of data; {found.source}"
    return Sampled(rows, found.tokens, source, documents)


def _elsewhere(inputs: Inputs) -> str:
    """Return the first address that is not on this machine, or ""."""
    remote = (file.name for file, _ in inputs.files if not isinstance(file.location, Path))
    hub = (address for address in inputs.datasets if address.startswith("hub:"))
    return next(chain(remote, hub), "")


def _read(config: RunConfig, encoder: Encoder, inputs: Inputs, scratch: Path) -> _Read:
    read, column = _Read(), config.training.curriculum.column
    encoders = encoders_by_part(config.data, encoder)
    parts = config.data.by_part()
    for name, part in parts.items():
        inputs_of_part = inputs.parts.get(name, inputs)
        groups = _groups(inputs_of_part, read)
        for address in inputs_of_part.datasets:
            read.total += _dataset_bytes(address, part)
        limit = _READ_BYTES / len(parts) / max(1, len(groups) + len(inputs_of_part.datasets))
        sources: list[Iterator[Chunk]] = [read_files(group, part, scratch) for group in groups]
        sources += [read_dataset(address) for address in inputs_of_part.datasets]
        for source in sources:
            before = read.bytes
            for chunk in source:
                if read.bytes - before >= limit:
                    read.complete = False
                    break
                chunk.given = inputs_of_part.given.get(getattr(chunk, "source", ""), chunk.given)
                read.add(inputs_of_part.filled(chunk, part), part, encoders[name], column)
            if close := getattr(source, "close", None):
                close()
    return read


def _groups(inputs: Inputs, read: _Read) -> list[list[tuple[SourceFile, str]]]:
    """Return the files to read, those of a source tree together, and count the bytes of all."""
    ours = []
    for file, kind in inputs.files:
        side = inputs.given.get(file.name, "train")
        if side in ("validation", "test"):
            read.given.add(side)
            continue
        ours.append((file, kind))
        read.total += file.size
    if ours and ours[0][1] == "source":
        few = ours[:: math.ceil(len(ours) / _RECORDS)]
        read.complete &= len(few) == len(ours)
        return [few]
    few = ours[:: math.ceil(len(ours) / _FILES)] if ours else []
    read.complete &= len(few) == len(ours)
    return [[each] for each in few]


def _dataset_bytes(address: str, data: DataConfig) -> int:
    """Return the stored size of the splits of a saved data set that may be trained on."""
    folder = local_path(address)
    splits = folder / "dataset_dict.json"
    names = json.loads(splits.read_text())["splits"] if splits.is_file() else ["."]
    pooled = data.splits == "pool"
    return sum(
        path.stat().st_size
        for name in names
        if pooled or side_of_split(name) in (None, "train")
        for path in (folder / name).glob("*.arrow")
    )


def _count(config: RunConfig, encoder: Encoder, read: _Read, scratch: Path) -> Sampled:
    """Return the rows of the training side, from the records that were read."""
    data, known = config.data, dict[bytes, Checked]()
    for record in read.good:
        identity = record.identity
        if data.parts and not data.mixture:
            identity = identity_in(record.slice or "", identity)
        known.setdefault(identity, record)
    shares = held_out(data, read.given)
    unique = sorted(known.items())
    if read.complete:
        trained = _on_the_training_side(
            [record for _, record in unique], data, encoder, shares, read.given
        )
        scale = 1.0
    else:
        trained = [record for _, record in unique]
        scale = (1 - sum(shares.values())) * max(1.0, read.total / max(1.0, read.bytes))
    documents, few = round(len(trained) * scale), _spread(trained)
    scale *= len(trained) / max(1, len(few))
    rows, tokens, how = _encode(config, encoder, few, scratch)
    if not rows:
        return Sampled(None, None, f"none of the first {read.records:,} records gives a row")
    whole = read.complete and len(few) == len(trained)
    records = (
        (f"all {read.records:,} records" if read.records > 1 else "its only record")
        if read.complete
        else (f"the first {read.records:,} records, scaled by the size of the files")
    )
    if read.complete and not whole:
        records += f", {len(few):,} of them encoded"
    count = max(1, round(rows * scale))
    source = (
        f"{'counted' if whole else 'an estimate'} from {records}, {how}: {count:,} sequences of "
        f"{tokens / rows:,.0f} tokens on average; near duplicates count"
    )
    return Sampled(count, tokens / rows, source, documents)


def _on_the_training_side(
    records: Sequence[Checked],
    data: DataConfig,
    encoder: Encoder,
    shares: dict[int, float],
    given: set[Side],
) -> list[Checked]:
    """Return the records that the split puts on the training side.

    Raises:
        DataError: a side is empty, so that no run can prepare these data.
    """
    places = np.array(
        [hash_position(one.identity, one.group, data.split_salt) for one in records], np.uint64
    )
    if encoder.labeled and shares and not has_label_sets(encoder):
        hashes = [int(value_digest(one.label)[:16], 16) for one in records]
        sides = stratify(places, np.array(hashes, np.uint64), shares)[0]
    else:
        sides = sides_at(places, shares)
    # Sets of labels are divided in another way, which keeps each side's share.
    codes = [TRAIN] if has_label_sets(encoder) else [*shares, TRAIN]
    documents = {SIDES[code]: int((sides == code).sum()) for code in codes}
    check_sides(documents, data, {}, given)
    return [one for one, side in zip(records, sides.tolist(), strict=True) if side == TRAIN]


def _spread(records: Sequence[Checked]) -> list[Checked]:
    """Return at most _RECORDS records with about _CHARACTERS characters, evenly spread."""
    characters = sum(len(record.content) for record in records)
    step = max(math.ceil(len(records) / _RECORDS), math.ceil(characters / _CHARACTERS), 1)
    return [*records[::step]]


def _encode(
    config: RunConfig, encoder: Encoder, records: Sequence[Checked], scratch: Path
) -> tuple[int, float, str]:
    """Return rows and tokens of records, and how they were counted."""
    settings: Any = encoder.tokenizer
    capacity = config.data.sequence_length
    given = config.model.tokenizer or config.model.base
    origin = _local_tokenizer(config) if given else None
    if given and origin is None:
        lengths = [
            sum(
                math.ceil(len(text) / CHARACTERS_OF_A_TOKEN) for text in settings.texts(one.content)
            )
            for one in records
        ]
        how = (
            f"with {CHARACTERS_OF_A_TOKEN} characters for a token, because the tokenizer of "
            f"{given} is not on this machine"
        )
        if encoder.packed:
            return max(1, math.ceil(sum(lengths) / capacity)), float(sum(lengths)), how
        return len(lengths), float(sum(min(length, capacity) for length in lengths)), how
    texts = (text for one in records for text in settings.texts(one.content))
    folder = scratch / "tokenizer"
    make_tokenizer(origin, texts, folder, settings, with_template(config))
    classes = (class_reader(encoder)(one.label) for one in records if one.label is not None)
    labels = tuple(in_order({*chain.from_iterable(classes)}))
    fitted = Fitted(folder, labels, frozenset(labels), scratch)
    contents = [Content(one.content, one.label, attachment=one.attachment) for one in records]
    result = [
        one for one in encoder.row_encoder(fitted).encode(contents) if not isinstance(one, Defect)
    ]
    rows = [row for one in result for row in one.rows]
    how = "with the model's tokenizer" if origin else "with a tokenizer trained on them"
    tokens = float(sum(row.tokens for row in rows))
    if encoder.packed:
        sequences = best_fit((row.values["input_ids"] for row in rows), capacity)
        return sum(1 for _ in sequences), tokens, how
    return len(rows), tokens, how


def _local_tokenizer(config: RunConfig) -> Path | None:
    """Return the folder of the model's tokenizer; None if it would have to be downloaded."""
    address = config.model.tokenizer or config.model.base or ""
    try:
        if address.startswith("hub:"):
            from huggingface_hub import snapshot_download

            revision = config.model.revision if not config.model.tokenizer else None
            name = address.removeprefix("hub:")
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        elif address.startswith(("s3:", "models:")):
            return None
        else:
            folder = resolve_model(address, config)
    except (BadInput, OSError, ValueError):
        return None
    return folder if any((folder / name).is_file() for name in _TOKENIZER_FILES) else None
