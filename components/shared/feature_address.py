"""The address of a table of a Feast feature store: feast:FOLDER?service=NAME&entities=FILE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl

KIND: Final = "feast"
FORM: Final = "feast:FOLDER?service=NAME&entities=FILE"
_OPTIONS: Final = ("service", "features", "entities")


@dataclass(frozen=True)
class FeatureAddress:
    """What an address names.

    folder: with the store's feature_store.yaml.
    service: a feature service of the store; "" if single features are named.
    features: VIEW:FEATURE of each, if no service is named.
    entities: address of one table with the keys, the times and the targets.
    """

    folder: str
    service: str
    features: tuple[str, ...]
    entities: str

    @classmethod
    def parse(cls, address: str) -> FeatureAddress:
        """Return what an address names.

        Raises:
            ValueError: it is not complete.
        """
        folder, _, query = address.removeprefix(f"{KIND}:").partition("?")
        # A plus sign is part of a name, such as c++, and no blank.
        pairs = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)
        options = dict(pairs)
        if unknown := [name for name, _ in pairs if name not in _OPTIONS]:
            raise ValueError(f"unknown option {unknown[0]}: give {', '.join(_OPTIONS)}")
        if len(options) < len(pairs):
            raise ValueError(f"an option is given twice: give {FORM}")
        features = tuple(name.strip() for name in options.get("features", "").split(",") if name)
        service, entities = options.get("service", ""), options.get("entities", "")
        if not folder.strip("/") or not entities:
            raise ValueError(f"names nothing: give {FORM}")
        if bool(service) == bool(features):
            raise ValueError(f"names no features, or a service beside them: give {FORM}")
        if wrong := next((name for name in features if not all(name.partition(":"))), ""):
            raise ValueError(f"{wrong!r} is no feature: give VIEW:FEATURE, separated by commas")
        return cls(folder, service, features, entities)


def is_feature_address(address: str) -> bool:
    """Return whether an address names a table of a feature store."""
    return address.startswith(f"{KIND}:")
