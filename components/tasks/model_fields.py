"""Fields of a model's configuration that Transformers does not know."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from steadytrain.components.shared.errors import BadInput, Problem
from steadytrain.components.shared.foreign import foreign


def unknown_fields(fields: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the fields that a model of this type does not have.

    Transformers silently accepts any field, so a typo would train a different model.
    """
    if _all_in_the_source(fields):
        return
    # Imported late, because it imports torch.
    from transformers import AutoConfig

    family = fields["model_type"]
    try:
        model = AutoConfig.for_model(family)
    except ValueError:
        yield Problem(
            "model.config.model_type",
            repr(family),
            "Transformers has no such model",
            "for example llama, gpt2, bert",
        )
        return
    known = model.to_dict().keys()
    for name in sorted(fields.keys() - known - model.attribute_map.keys()):
        if name != "attn_implementation":
            yield Problem(
                f"model.config.{name}",
                repr(fields[name]),
                f"a {family} model has no such field",
                f"one of {', '.join(sorted(known))}",
            )


def refusal(fields: Mapping[str, Any]) -> str:
    """Return why the class of a model's configuration refuses values; "" if it takes them."""
    if importlib.util.find_spec("transformers") is None:
        return ""  # As above.
    from transformers import AutoConfig

    try:
        with foreign("", ""):
            AutoConfig.for_model(**fields)
    except BadInput as error:
        return re.sub(r"^: (?:StrictDataclass\w+: )?", "", error.message)
    return ""


def _all_in_the_source(fields: Mapping[str, Any]) -> bool:
    """Return whether Transformers' code for this model has every field's name as a word.

    No typo does, and reading a file is a hundred times faster than importing it.
    """
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return True  # A machine that submits runs and trains none. Where the model is built, it is.
    root, family = Path(package.origin).parent, str(fields["model_type"]).replace("-", "_")
    names = ["configuration_utils.py", f"models/{family}/configuration_{family}.py"]
    try:
        words = set(re.findall(r"\w+", "".join((root / name).read_text() for name in names)))
    except OSError:
        return False
    return fields.keys() <= words
