"""Which family a config.json belongs to; architectures decide before model_type."""

from collections.abc import Mapping
from typing import Any

from numem.errors import CheckpointError, UnsupportedModelError
from numem.models.architecture.families import Family
from numem.models.architecture.refused import NEUTRAL, REFUSED, REFUSED_SETTINGS


def find_family(config: Mapping[str, Any], families: Mapping[str, Family]) -> tuple[Family, bool]:
    """The family, and whether its models have an output head.

    Raises:
        UnsupportedModelError: a family, class or setting that is not run, named.
        CheckpointError: nothing that names a family, or malformed values.
    """
    model_type = config.get("model_type")
    listed = config.get("architectures") or []
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise CheckpointError(f"config.json: architectures is {listed!r}, not a list of names")
    if model_type is not None and not isinstance(model_type, str):
        raise CheckpointError(f"config.json: model_type is {model_type!r}, not a name")
    if isinstance(model_type, str) and model_type in REFUSED:
        raise UnsupportedModelError(
            f"config.json: model_type {model_type!r} is not run: it needs {REFUSED[model_type]}", "model-type"
        )
    by_class = {name: family for family in families.values() for name in (*family.architectures, *family.bare)}
    family = next((by_class[name] for name in listed if name in by_class), None) or families.get(model_type or "")
    if family is None and model_type is None:
        raise CheckpointError("config.json: model_type is missing, so the architecture is unknown")
    if family is None:
        raise UnsupportedModelError(
            f"config.json: unknown model_type {model_type!r}; run: {', '.join(families)}", "model-type"
        )
    known = (*family.architectures, *family.bare)
    for name in listed:
        if name not in known or families.get(model_type or "", family) is not family:
            raise UnsupportedModelError(
                f"config.json: architecture {name!r} is not run for model_type {model_type!r}; only "
                + ", ".join(known if name not in known else families[str(model_type)].architectures),
                "architecture",
            )
    head = any(name in family.architectures for name in listed) if listed else bool(family.architectures)
    return family, head


def text_part(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """The part of config.json that describes the text model: all of it, or what the family wraps.

    Raises:
        UnsupportedModelError: a wrapped model in a family that has none, or another model than the family wraps.
        CheckpointError: nothing wrapped where something should be.
    """
    if family.text is None:
        if isinstance(config.get("text_config"), Mapping):
            raise UnsupportedModelError(
                f"config.json: model_type {family.model_type!r} wraps a text_config (multi-modal input)", "model-type"
            )
        return config
    text = config.get(family.text)
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: {family.text} of a {family.model_type} model is {text!r}, not an object")
    inner = text.get("model_type", f"{family.model_type}_text")
    if inner != f"{family.model_type}_text":
        raise UnsupportedModelError(
            f"config.json: {family.model_type} around a {inner!r} text model is not run", "model-type"
        )
    return text


def check_settings(config: Mapping[str, Any], family: Family) -> None:
    """Refuse settings that would change the numbers and that this family does not run."""
    for key, reason in REFUSED_SETTINGS.items():
        value = config.get(key)
        # True equals 1, which is neutral only as a number.
        if key not in family.runs and (value is True or value not in NEUTRAL):
            raise UnsupportedModelError(f"config.json: {key} is set: {reason}")
