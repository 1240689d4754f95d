"""Write made-up trades and whether each made a profit: `python make_data.py FOLDER`.

The data are synthetic. The log-odds of a profit are a formula of the columns, so the best possible
accuracy is known; it is printed. Real trades are not like that: do not trade by this model.
"""

import csv
import random
import sys
from math import exp
from pathlib import Path

TRADES = 6000
VENUES = {"alpha": 0.4, "beta": 0.0, "gamma": -0.6}


def log_odds(trade: dict[str, object]) -> float:
    """Return the log-odds of a profit: momentum pays in calm markets, spread and size cost."""
    momentum, volatility = float(trade["momentum"]), float(trade["volatility"])
    sign = 1 if trade["side"] == "buy" else -1
    found = sign * momentum * (3 if volatility < 0.2 else -1)
    found += -0.25 * float(trade["spread_bps"]) + VENUES[str(trade["venue"])] + 1.0
    return found - (1.5 if int(trade["size"]) > 5000 else 0.0)


def main(folder: Path) -> None:
    """Write the records to a folder."""
    chance = random.Random(20)
    best = 0.0
    with (folder / "trades.csv").open("w", encoding="utf-8", newline="") as out:
        columns = ("side", "venue", "size", "spread_bps", "momentum", "volatility", "profit")
        rows = csv.DictWriter(out, columns)
        rows.writeheader()
        for _ in range(TRADES):
            trade: dict[str, object] = {
                "side": chance.choice(["buy", "sell"]),
                "venue": chance.choice(list(VENUES)),
                "size": int(chance.lognormvariate(7.5, 1)),
                "spread_bps": round(chance.expovariate(0.4), 2),
                "momentum": round(chance.gauss(0, 1), 3),
                "volatility": round(chance.lognormvariate(-1.6, 0.5), 3),
            }
            likely = 1 / (1 + exp(-log_odds(trade)))
            best += max(likely, 1 - likely) / TRADES
            trade["profit"] = "yes" if chance.random() < likely else "no"
            rows.writerow(trade)
    print(f"best possible accuracy: {best:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
