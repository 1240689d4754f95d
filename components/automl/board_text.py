"""The board of a search in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from steadytrain.components.automl.board import Board, shares
from steadytrain.components.pages.charts import aligned
from steadytrain.components.shared.quantities import duration, number, size


def lines(board: Board | None) -> list[str]:
    """Return the board as lines of text."""
    if board is None:
        return ["", "no configuration is trained on all folds yet"]
    shown = board_rows(board)
    table = [(name, *cells) for name, cells in shown]
    text = ["", *aligned([("configuration", *HEADER), *table]), ""]
    text += [f"{label}: {said}" for label, said in verdicts(board)]
    text += [f"left out: {name}, because {reason}" for name, reason in board.skipped.items()]
    return text


HEADER: Final = ("loss", "spread", "share", "fit", "ms/record", "size", "")


def board_rows(board: Board) -> list[tuple[str, list[str]]]:
    """Return the configurations as words, the best first."""
    members = shares(board)
    return [
        (
            row.configuration.name,
            [
                number(row.score),
                number(row.spread),
                f"{members[row.configuration.name]:.0%}" if place in board.weights else "",
                duration(row.seconds),
                number(row.latency_ms),
                size(row.size_mb * 1e6),
                f"misses a limit: {row.missed}" if row.missed else "",
            ],
        )
        for place, row in enumerate(board.rows)
    ]


def verdicts(board: Board) -> Iterator[tuple[str, str]]:
    """Yield what the scores of a board are worth, each with its label."""
    if not board.weights:
        yield "winner", "no configuration keeps the constraints"
        return
    yield "winner", ", ".join(f"{name} {share:.0%}" for name, share in shares(board).items())
    yield (
        "promised",
        f"{number(board.corrected)}, corrected for the choice among {len(board.rows)} "
        f"configurations; {number(board.score)} on the records that chose",
    )
    if board.calibration.temperature != 1:
        yield (
            "calibrated",
            f"by the temperature {number(board.calibration.temperature)}; without it, the promise "
            f"would be {number(board.uncalibrated)}",
        )
    if board.decided:
        likeliest, decided = board.decided
        weights = ", ".join(
            f"{label} {number(weight)}"
            for label, weight in zip(board.labels, board.calibration.decision, strict=True)
        )
        yield (
            "decisions",
            f"promise {number(decided)}, and {number(likeliest)} if the likeliest class were "
            f"predicted; weights of the classes: {weights}",
        )
    if board.better is not None:
        low, high = board.better.low, board.better.high
        verdict = "yes" if low > 0 else "no, it is worse" if high < 0 else "no"
        yield (
            "better than default LightGBM by more than chance?",
            f"{verdict}: its loss is lower by {number(board.better.value)} "
            f"({number(low)} to {number(high)})",
        )
