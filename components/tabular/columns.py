"""What the columns of a table are: numbers, categories, dates, texts, or nothing to learn from.

The kinds are inferred from the training side alone. Nothing here imports torch.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from steadytrain.components.pages.data_section import MOST_COLUMNS
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.left_out import readable
from steadytrain.components.tabular.model import level_of, numbers_of
from steadytrain.components.tasks.encoding.leaks import ALLOW, FEW, function_of

Kind = Literal["number", "category", "date", "text", "image"]
Values = Sequence[Any]

_STRAY: Final = 0.05
"""Share of values up to which those that are not numbers are errors in a column of numbers."""
_WORDS: Final = 4.0
"""Mean number of words from which a column of different texts is text."""
_DATED: Final = re.compile(r"\s*\d{1,4}([./-])\d{1,2}\1\d{1,4}(\D|$)")
"""Three numbers as a date has them, in any order, such as 31.01.2024."""
_SHOWN: Final = 3
_FREQUENT: Final = 10
"""Categories that are counted."""
_QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
_BARS: Final = 12
"""Equal parts of the range of a number whose values are counted."""
_MANY: Final = 10
"""Columns for which the same is said one by one."""
_IDENTIFIES: Final = "every value is different, so it identifies a record"
_CHANCE: Final = 1e-3
"""Chance that any column of a table gives the target away only by accident.

A column is one of many, and gets its part of it (Bonferroni). Its own chance is that of Fisher's
exact test, for several classes by Freeman and Halton (Biometrika 38, 1951): the share of the orders
in which the targets could stand among the records that fit the column as well as theirs does. So
neither a rare class nor a column with many rare values is taken for evidence.
"""
_FEW_OF_A_CLASS: Final = 3
"""Records from which a value, or its absence, says something about the class of its records."""
_PAIR: Final = 2
"""The same about a number, since two records rarely have the same one."""


class Column(BaseModel):
    """A column of the training side.

    kind: None if it is not learned from.
    reason: why it is not; "" if it is.
    note: what is odd about its values; "" if nothing is.
    missing: share of the records without a value.
    infinite: number of infinite values in a column of numbers, which count as missing.
    distinct: number of different values.
    examples: the most frequent ones, with how many records have them: ten categories of a column
        that the data card shows, otherwise three values.
    low, high: of a column of numbers.
    quantiles: values that 5, 25, 50, 75 and 95 % of the numbers do not exceed, and
    histogram: how many numbers are in equal parts from low to high. They are empty for columns that
        the data card does not show: of a wide table, they would be most of what is kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: Kind | None
    reason: str = ""
    note: str = ""
    missing: float = 0.0
    infinite: int = 0
    distinct: int = 0
    examples: list[str] = []
    low: float | None = None
    high: float | None = None
    quantiles: list[float] = []
    histogram: list[int] = []


class Table(BaseModel):
    """The columns of a table, in the order of their names.

    unread_elsewhere: what was found by `unread` on the other sides.
    copies: records of each held-out side that one of the training side equals in the target and
        all that is learned from.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    columns: list[Column]
    unread_elsewhere: list[str] = []
    copies: dict[str, int] = {}

    @property
    def features(self) -> dict[str, Kind]:
        """The kinds of the columns that are learned from."""
        return {column.name: column.kind for column in self.columns if column.kind}

    def remarks(self) -> Iterator[str]:
        """Yield a sentence for each column that is not learned from, or whose values are odd.

        Many columns without two different values share a sentence.
        """
        same = [item.name for item in self.columns if item.reason and item.distinct < 2]
        if len(same) <= _MANY:
            same = []
        else:
            names = ", ".join(repr(readable(name)) for name in same[:_SHOWN])
            yield (
                f"{len(same):,} columns are not learned from, since each has one value or none: "
                f"{names} and {len(same) - _SHOWN:,} others"
            )
        yield from self._infinite()
        grouped = {*same}
        for column in self.columns:
            if column.name in grouped:
                continue
            name = f"the column {readable(column.name)!r}"
            if column.reason:
                yield f"{name} is not learned from: {column.reason}"
            elif column.note:
                yield f"{name} {column.note}"
        yield from self.unread_elsewhere
        unlearned = ", ".join(repr(readable(name)) for name in self.unlearned[:_SHOWN])
        for side, count in self.copies.items():
            yield (
                f"{count:,} records of the {side} side equal one of the training side in the "
                f"target and all columns that are learned from; they differ in others, such as "
                f"{unlearned}. Their scores may be too good: name the columns to learn from in "
                "data.features, and equal records are on one side"
            )

    @property
    def unlearned(self) -> list[str]:
        """The columns with several values that are not learned from."""
        return [it.name for it in self.columns if not it.kind and it.distinct > 1]

    def copied(self, known: Iterable[tuple[Mapping[str, Any], Any]]) -> Iterator[tuple[Any, ...]]:
        """Yield for each record and its target what is the same of equal ones."""
        names = [*self.features]
        for record, target in known:
            # Lists and mappings are no keys.
            yield target, *(json.dumps(record.get(name), sort_keys=True) for name in names)

    def _infinite(self) -> Iterator[str]:
        """Yield a sentence about infinite values: one for each column, or for many together."""
        infinite = [(repr(readable(item.name)), item.infinite) for item in self.columns]
        infinite = [(name, count) for name, count in infinite if count]
        if len(infinite) <= _MANY:
            for name, count in infinite:
                yield f"the column {name} has {_infinite(count)}"
        else:
            shown = ", ".join(f"{name} ({count:,})" for name, count in infinite[:_SHOWN])
            yield (
                f"{len(infinite):,} columns have {_infinite(sum(count for _, count in infinite))}: "
                f"{shown} and {len(infinite) - _SHOWN:,} others"
            )

    def card(self) -> dict[str, Any]:
        """Return the fields of the data card."""
        columns: list[dict[str, Any]] = self.model_dump()["columns"]
        return {
            "columns": [{**each, "examples": [*map(redact, each["examples"])]} for each in columns]
        }

    def unread(self, records: Sequence[Mapping[str, Any]], side: str) -> Iterator[str]:
        """Yield a sentence for each column with values of another kind on a held-out side."""
        for name, kind in self.features.items():
            if kind not in ("number", "date"):
                continue
            values = [record.get(name) for record in records]
            wrong = [values[index] for index in _others(values, kind)]
            if kind == "number":
                infinite = sum(map(_is_infinite, wrong))
                wrong = [value for value in wrong if not _is_infinite(value)]
                if infinite:
                    where = f"the column {readable(name)!r} of the {side} side"
                    yield f"{where} has {_infinite(infinite)}"
            if wrong:
                yield (
                    f"the column {readable(name)!r} of the {side} side has {len(wrong):,} values "
                    f"that are not a {kind}, such as {str(wrong[0])[:40]!r}; they count as missing"
                )


@dataclass(frozen=True)
class Target:
    """What is predicted.

    values: for each record, its class or number; of each of several labels, whether it has it.
    numbers: whether it is a number.
    """

    name: str
    values: Sequence[NDArray[Any]]
    numbers: bool


def inferred(
    columns: Mapping[str, Values],
    target: Target,
    *,
    allowed: Sequence[str] = (),
    categories: Sequence[str] = (),
    text: str | None = None,
) -> Table:
    """Describe the columns of the training side.

    Args:
        columns: values by column, as JSON has them; None where there is none.
        allowed: columns to learn from although they identify a record or give the target away.
        categories: columns whose values are categories, whatever they look like.
        text: the column that is text in any case, if there is one of that name; others may be, too.

    Raises:
        DataError: an allowed column or one of categories is not there, or the latter is the text.
    """
    for field, names in (("allow_leaks", allowed), ("categories", categories)):
        if unknown := sorted({*names} - columns.keys()):
            raise DataError(
                f"data.{field} names {unknown[0]!r}, which is no column to learn from",
                remedy=f"leave it out; these columns are {', '.join(sorted(columns))[:500]}",
            )
    if text in categories:
        raise DataError(
            f"data.categories names {text!r}, which data.columns.text says is text",
            remedy="leave it out of one of the two",
        )
    chance = _CHANCE / max(1, len(columns) * len(target.values))
    result = [
        _column(
            *(name, values, target, None if name in allowed else chance),
            of_categories=name in categories,
            text=text,
            drawn=place < MOST_COLUMNS,
        )
        for place, (name, values) in enumerate(sorted(columns.items()))
    ]
    return Table(target=target.name, columns=result)


def _column(
    name: str,
    values: Values,
    target: Target,
    chance: float | None,
    *,
    of_categories: bool,
    text: str | None,
    drawn: bool,
) -> Column:
    """Describe a column.

    Args:
        chance: that it gives the target away by accident; None if it may do so.
        drawn: whether the data card shows how its values are distributed.
    """
    # Of each value, NaN if it is not a number. It is parsed once, for tables with many values.
    numbers, missing = numbers_of(values)
    rows = ~missing
    present = [*itertools.compress(values, rows)] if missing.any() else values
    numbers = numbers[rows]
    counts = Counter(map(str, present))
    allowed = chance is None
    if of_categories:
        kind, reason, note = _category(present, numbers, counts, allowed=allowed)
    else:
        kind, reason, note = _kind(name, present, numbers, counts, allowed=allowed, text=text)
    if kind and chance is not None:
        clues: NDArray[np.float64] | list[str]
        if kind == "number":
            # What is not a number counts as missing.
            rows[rows] = there = ~np.isnan(numbers)
            clues = numbers[there]
        else:
            clues = [*map(level_of, present)]
        evidence = (_leak(clues, rows, truth, target.numbers, chance) for truth in target.values)
        if result := next(filter(None, evidence), ""):
            kind, reason = None, f"{result}; {ALLOW}"
    number, nan = kind == "number", np.isnan(numbers)
    finite = numbers[~nan & number]
    others = [present[index] for index in np.flatnonzero(nan & number).tolist()]
    return Column(
        name=name,
        kind=kind,
        reason=reason,
        note=note,
        missing=round(1 - len(present) / max(1, len(values)), 6),
        infinite=sum(map(_is_infinite, others)),
        distinct=len(counts),
        examples=[
            f"{value[:40]} ({count})"
            for value, count in heapq.nsmallest(
                _FREQUENT if drawn and kind == "category" else _SHOWN,
                counts.items(),
                key=lambda item: (-item[1], item[0]),
            )
        ],
        low=float(finite.min()) if len(finite) else None,
        high=float(finite.max()) if len(finite) else None,
        **_distribution(finite) if drawn and len(finite) else {},
    )


def _distribution(numbers: NDArray[np.float64]) -> dict[str, Any]:
    """Return the quantiles and the histogram of finite numbers."""
    # np.histogram refuses a range that is narrower than its bins can be.
    low, high = numbers.min(), numbers.max()
    shares = (numbers - low) / ((high - low) or 1.0)
    places = np.minimum((shares * _BARS).astype(int), _BARS - 1)
    quantiles = np.quantile(numbers, _QUANTILES, method="inverted_cdf")
    return {
        "quantiles": quantiles.tolist(),
        "histogram": np.bincount(places, minlength=_BARS).tolist(),
    }


def _kind(
    name: str,
    present: Values,
    numbers: NDArray[np.float64],
    counts: Mapping[str, int],
    *,
    allowed: bool,
    text: str | None,
) -> tuple[Kind | None, str, str]:
    """Return the kind of a column, or None and why it is not learned from, and what is odd."""
    odd = np.flatnonzero(np.isnan(numbers)).tolist()
    if reason := _nothing(present, counts, odd):
        return None, reason, ""
    if name == text:
        return "text", "", ""
    different = len(counts) == len(present) >= FEW
    other = [present[index] for index in odd if not _is_infinite(present[index])]
    finite = numbers[~np.isnan(numbers)]
    if not other and not len(finite):
        return None, "every value is infinite", ""
    if not other:
        if different and not allowed and _numbers_records(name, finite):
            return None, f"it numbers the records; {ALLOW}", ""
        return "number", "", ""
    return _other_kind(present, counts, other, different=different and not allowed)


def _category(
    present: Values, numbers: NDArray[np.float64], counts: Mapping[str, int], *, allowed: bool
) -> tuple[Kind | None, str, str]:
    """Return the same as `_kind` of a column whose values are categories."""
    if reason := _nothing(present, counts, np.flatnonzero(np.isnan(numbers)).tolist()):
        return None, reason, ""
    if not allowed and len(counts) == len(present) >= FEW:
        return None, f"{_IDENTIFIES}; {ALLOW}", ""
    return "category", "", ""


def _nothing(present: Values, counts: Mapping[str, int], odd: Sequence[int]) -> str:
    """Return why nothing can be learned from a column of any kind; "" if something can.

    Args:
        odd: places of the values that are not numbers.
    """
    if not present:
        return "every value is missing"
    if any(isinstance(present[index], list | dict) for index in odd):
        return "it has lists or mappings"
    return f"every value is {next(iter(counts))[:40]!r}" if len(counts) == 1 else ""


def _other_kind(
    present: Values,
    counts: Mapping[str, int],
    other: Values,
    *,
    different: bool,
) -> tuple[Kind | None, str, str]:
    """Return the same of a column with values that are not numbers, which are `other`."""
    odd = ""
    if len(other) < len(present) / 2:
        odd = f"has {len(other):,} values that are not numbers, such as {str(other[0])[:40]!r}"
    if len(other) <= _STRAY * len(present) and len(counts) > FEW:
        return "number", "", f"{odd}; they count as missing"
    undated = [value for value in present if not _is_date(value)]
    if not undated:
        return "date", "", _zones(present)
    likely = len(present) - len(undated) + sum(bool(_DATED.match(str(it))) for it in undated)
    if likely > len(present) / 2:
        example = str(undated[0])[:40]
        odd = f"has {len(undated):,} values that are not dates in ISO 8601, such as {example!r}"
    words = sum(len(str(value).split()) for value in present) / len(present)
    if words >= _WORDS and len(counts) > len(present) / 2:
        return "text", "", ""
    if different:
        why = f"{_IDENTIFIES}; {ALLOW}"
        return None, f"{why}. It {odd}" if odd else why, ""
    return "category", "", odd and f"{odd}; all its values are learned as categories"


def _zones(dates: Values) -> str:
    """Return what is odd about dates of which some have a time zone; "" if all or none have."""
    count = sum(datetime.fromisoformat(str(date).strip()).tzinfo is not None for date in dates)
    if count in (0, len(dates)):
        return ""
    return f"has {count:,} dates with a time zone; the other {len(dates) - count:,} count as UTC"


def _others(values: Values, kind: Kind) -> list[int]:
    """Return the places of values that are there and are not of a kind: numbers or dates."""
    numbers, missing = numbers_of(values)
    if kind == "number":
        result: list[int] = np.flatnonzero(np.isnan(numbers) & ~missing).tolist()
        return result
    return [index for index in np.flatnonzero(~missing).tolist() if not _is_date(values[index])]


def _is_date(value: Any) -> bool:
    return isinstance(value, str) and is_date(value)


def _is_infinite(value: Any) -> bool:
    """Return whether a value is an infinite number, also as text: inf, -Infinity or 1e400."""
    try:
        return not isinstance(value, bool) and math.isinf(float(value))
    except (TypeError, ValueError):
        return False
    except OverflowError:
        return True


def _infinite(count: int) -> str:
    return f"{count:,} infinite {'value' if count == 1 else 'values'}; they count as missing"


def _numbers_records(name: str, numbers: NDArray[np.float64]) -> bool:
    """Return whether different whole numbers are those of records, such as a row number."""
    if (numbers % 1).any():
        return False
    dense = numbers.max() - numbers.min() < 1.5 * len(numbers)
    named = re.search(r"(^|[_\W])(id|index|key|uuid|nr|no|row_?(names?|number|id)?)$", name.lower())
    return named is not None or (dense and numbers.min() in (0, 1) and len(numbers) >= 10 * FEW)


def is_date(text: str) -> bool:
    """Return whether text is a date in ISO 8601, such as 2024-05-31 or 2024-05-31T12:00:00."""
    if not re.match(r"\s*\d{4}-\d{2}-\d{2}", text):
        return False
    try:
        datetime.fromisoformat(text.strip())
    except ValueError:
        return False
    return True


def _leak(
    clues: NDArray[np.float64] | list[str],
    rows: NDArray[np.bool_],
    truth: NDArray[Any],
    numbers: bool,
    chance: float,
) -> str:
    """Return how a column alone gives the target away, or "".

    Args:
        clues: its values, where it has one: numbers or texts.
        rows: whether each record has one.
        numbers: whether the target is a number.
        chance: that it fits by accident; a column that may is no evidence.
    """
    if not numbers and (result := _absence(rows, truth, chance)):
        return result
    truth = truth[rows]
    if len(clues) < FEW:
        return ""
    if isinstance(clues, list):
        return _levels(clues, truth, numbers, chance)
    if result := function_of(clues, truth) if numbers else _intervals(clues, truth, chance):
        return result
    # Codes such as 1 to 8 are numbers too, but have no order.
    if len(np.unique(clues)) > len(clues) / _PAIR:
        return ""
    return _levels([*map(str, clues.tolist())], truth, numbers, chance)


def _absence(rows: NDArray[np.bool_], truth: NDArray[Any], chance: float) -> str:
    """Return whether one class has a value where all others have none, or the other way round."""
    having = int(rows.sum())
    lacking = len(rows) - having
    if min(having, lacking) < _FEW_OF_A_CLASS:
        return ""
    present, absent = np.unique(truth[rows]), np.unique(truth[~rows])
    if 1 not in (len(present), len(absent)) or np.isin(present, absent).any():
        return ""
    if _by_accident(rows, math.log(2 * (len(present) + len(absent)))) > chance:
        return ""
    one, others = (having, lacking) if len(present) == 1 else (lacking, having)
    has, have = ("has a value", "none") if len(present) == 1 else ("has no value", "one")
    return (
        f"each of the {one:,} records of one class of the target {has}, and the {others:,} others "
        f"have {have}"
    )


def _levels(values: Sequence[str], truth: NDArray[Any], numbers: bool, chance: float) -> str:
    """Return whether all records with the same text have the same target.

    Only texts that repeat are evidence, so most records must have one of them.
    """
    pairs = Counter(zip(values, truth.tolist(), strict=True))
    if len(pairs) > len({value for value, _ in pairs}):
        return ""
    least = _PAIR if numbers else _FEW_OF_A_CLASS
    repeated = [np.full(count, target) for (_, target), count in pairs.items() if count >= least]
    targets = np.concatenate(repeated or [truth[:0]])
    different = len(np.unique(targets))
    if different < 2 or len(targets) < len(values) / 2:
        return ""
    # Each text could stand for each of the targets.
    if _by_accident(targets, log_ways=len(repeated) * math.log(different)) > chance:
        return ""
    told = "has one number as the target" if numbers else "belongs to one class of the target"
    return f"each of its {len(pairs):,} values {told}"


def _intervals(numbers: NDArray[np.float64], truth: NDArray[Any], chance: float) -> str:
    """Return whether the classes have disjoint intervals of numbers."""
    order = np.argsort(numbers, kind="stable")
    sorted_truth, sorted_numbers = truth[order], numbers[order]
    changes = np.flatnonzero(sorted_truth[1:] != sorted_truth[:-1])
    classes = len(np.unique(truth))
    separate = (sorted_numbers[changes] < sorted_numbers[changes + 1]).all()
    if len(changes) != classes - 1 or not len(changes) or not separate:
        return ""
    if _by_accident(truth, log_ways=math.lgamma(classes + 1)) > chance:
        return ""
    return f"its numbers separate the {classes} classes of the target without an error"


def _by_accident(targets: NDArray[Any], log_ways: float) -> float:
    """Return the most that the chance can be of targets in an order that fits a column.

    Args:
        log_ways: the logarithm of the number of orders that fit.
    """
    _, counts = np.unique(targets, return_counts=True)
    orders = math.lgamma(len(targets) + 1) - sum(math.lgamma(count + 1) for count in counts)
    return math.exp(min(0.0, log_ways - orders))
