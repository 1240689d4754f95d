"""Program in the doctor's trial pod: check MLflow, and print the result as one line of JSON."""

from __future__ import annotations

import dataclasses
import json

from steadytrain.pipelines.cluster.doctor import checked
from steadytrain.pipelines.cluster.round_trips import try_tracking

if __name__ == "__main__":
    (line,) = checked("MLflow", try_tracking)
    print(json.dumps(dataclasses.asdict(line)))
