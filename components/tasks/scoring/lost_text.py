"""What a tokenizer loses of a text, and what that costs a model.

Unknown tokens, and normalizers that drop or change characters, make a text easier to predict by
discarding information. Without a cost for that, a model that knows one word and "unknown" would win
every comparison in bits per byte. Therefore each byte that is missing from the tokens costs 8 bits,
the cost of sending it as is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from steadytrain.components.tasks.encoding.tokens import Encoded, scored_text

NATS_A_BYTE = math.log(256)


def lost_nats(tokenizer: Any, record: Mapping[str, Any], encoded: Encoded) -> float:
    """Return the cost of the text that a record's scored tokens lose. It is 0 for most tokenizers.

    Characters are counted, not aligned. That gives a lower bound in time linear in the text.
    """
    text = scored_text(record)
    pairs = zip(encoded.input_ids, encoded.targets, strict=True)
    known = [token for token, scored in pairs if scored and token != tokenizer.unk_token_id]
    decoded = tokenizer.decode(known, clean_up_tokenization_spaces=False)
    if decoded == text:
        return 0.0
    missing = Counter(text) - Counter(decoded)
    lost = sum(count * len(character.encode()) for character, count in missing.items())
    return lost * NATS_A_BYTE
