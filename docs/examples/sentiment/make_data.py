"""Write words with the sentiment that ten people gave each: `python make_data.py FOLDER`.

They are the lexicon of VADER (Hutto and Gilbert, 2014; MIT license), which the PyPI package
vaderSentiment brings. Each line has the text and its ratings from -4 to 4.
"""

import json
import sys
from ast import literal_eval
from importlib.resources import files
from pathlib import Path


def main(folder: Path) -> None:
    """Write the records to a folder."""
    lexicon = (files("vaderSentiment") / "vader_lexicon.txt").read_text(encoding="utf-8")
    with (folder / "sentiment.jsonl").open("w", encoding="utf-8") as out:
        for line in lexicon.splitlines():
            text, _, _, ratings = line.split("\t")
            signs = [(rating > 0) - (rating < 0) for rating in literal_eval(ratings)]
            label = "positive" if sum(signs) > 0 else "negative"
            # Letters only, no emoticons; at least eight of the ten people must agree.
            if text.replace("-", "").isalpha() and abs(sum(signs)) >= 8:
                # "abandon" and "abandoned" belong to one side of the split.
                record = {"text": text.replace("-", " "), "label": label, "stem": text[:5]}
                out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
