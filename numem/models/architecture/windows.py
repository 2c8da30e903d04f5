"""Which layers slide over a window, and how wide it is."""

from numem.errors import CheckpointError, UnsupportedModelError
from numem.models.architecture.config import Config
from numem.models.architecture.descriptor import FULL, SLIDING
from numem.models.architecture.families import Family

_KINDS = {"full_attention": FULL, "sliding_attention": SLIDING}


def read_windows(config: Config, family: Family, layers: int, causal: bool) -> tuple[int, int, tuple[str, ...]]:
    """(keys up to and including the query's own, keys beyond it, kind of each layer); 0 keys for no limit.

    A stored size w is w keys in a causal model. In a bidirectional one it is keys at a distance of at most w // 2.

    Raises:
        CheckpointError: sizes or lists that contradict each other.
        UnsupportedModelError: a layer type that is not run.
    """
    if family.window == "none":
        return 0, 0, (FULL,) * layers
    if family.window in ("all", "switch"):
        off = config.get("sliding_window") is None or (
            family.window == "switch" and not config.flag("use_sliding_window")
        )
        window = 0 if off else config.count("sliding_window")
        return window, 0, (SLIDING if window else FULL,) * layers
    listed = _listed(config, layers)
    if family.window == "flag":
        return _by_flag(config, layers, listed)
    kinds = listed or _by_pattern(config, family, layers)
    size = 0 if config.get("sliding_window") is None else config.count("sliding_window")
    if SLIDING not in kinds or not size:
        return 0, 0, kinds
    return (size, 0, kinds) if causal else (size // 2 + 1, size // 2, kinds)


def _listed(config: Config, layers: int) -> tuple[str, ...] | None:
    types = config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers:
        raise CheckpointError(f"config.json: layer_types does not list {layers} layers")
    for kind in types:
        if kind not in _KINDS:
            raise UnsupportedModelError(
                f"config.json: layer type {kind!r} is not run; known: {', '.join(_KINDS)}", "layer-type"
            )
    return tuple(_KINDS[kind] for kind in types)


def _by_flag(config: Config, layers: int, listed: tuple[str, ...] | None) -> tuple[int, int, tuple[str, ...]]:
    """An explicit list wins over max_window_layers, which is only its default."""
    window, kinds = 0, (FULL,) * layers
    if config.flag("use_sliding_window"):
        window = config.count("sliding_window")
        first = config.count("max_window_layers", least=0)
        kinds = tuple(SLIDING if layer >= first else FULL for layer in range(layers))
    elif listed and SLIDING in listed:
        raise CheckpointError("config.json: layer_types has sliding layers, but use_sliding_window is false")
    kinds = listed or kinds
    return (window if SLIDING in kinds else 0), 0, kinds


def _by_pattern(config: Config, family: Family, layers: int) -> tuple[str, ...]:
    """Every pattern-th layer is full."""
    given = {key: config.count(key) for key in family.pattern_keys if config.get(key) is not None}
    if len(set(given.values())) > 1:
        raise CheckpointError(
            f"config.json: {' and '.join(f'{key} {value}' for key, value in given.items())} disagree; keep one of them"
        )
    pattern = next(iter(given.values()), family.pattern)
    return tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(layers))
