"""The preprocess step as a program, given a config file.

It has to be a file, because its worker processes import it again.
"""

from __future__ import annotations

import sys

from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.config import load

if __name__ == "__main__":
    record = run(load(sys.argv[1]))
    print(f"steadytrain keeps {sum(side.documents for side in record.sides.values())} records")
