"""config.json, and what it says about how the weights are quantized.

The block size of FP8 weights comes from here or is 128 x 128; it is never derived from the shapes of weight and
scale, because with partial blocks several sizes fit (576 rows with 5 scales are 4.5 blocks of 128, and 144 rows
with 2 scales would pass for blocks of 72).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import SourceError, UnsupportedError
from ..scheme import FP8_BLOCK
from .header import DuplicateKeyError, parse_json_object
from .store import FileStore

CONFIG = "config.json"
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Declared:
    """What quantization_config declares.

    Attributes:
        block: rows and columns that share an FP8 scale where scales are per block.
        strategies: the FP8 scale layouts that are declared (``block``, ``channel``, ``tensor``); empty if silent.
        group_sizes: the INT4 group sizes that are declared; 0 stands for one group per row.
        packed_bits: the widths of packed integers that are declared.
    """

    block: tuple[int, int] = FP8_BLOCK
    strategies: frozenset[str] = frozenset()
    group_sizes: frozenset[int] = frozenset()
    packed_bits: frozenset[int] = frozenset()


def read_config(store: FileStore) -> tuple[dict[str, Any], bytes, tuple[str, ...]]:
    """Content of config.json, its bytes, and warnings; ``{}`` and no bytes when there is none.

    Raises:
        SourceError: not UTF-8, not JSON, not an object, or a key stands twice.
    """
    size = store.names().get(CONFIG)
    if size is None:
        return {}, b"", (f"there is no {CONFIG}: the model family can only be told from tensor names",)
    raw = store.read_at(CONFIG, 0, size)
    again = "Restore the publisher's config.json."
    try:
        config = parse_json_object(raw.decode("utf-8-sig"), constants=True)
        _check_content(config)
        return config, raw, ()
    except UnicodeDecodeError as error:
        raise SourceError(
            f"is not UTF-8 (byte {error.start}: {error.reason})", where=CONFIG, hint=again
        ) from error
    except DuplicateKeyError as error:
        raise SourceError(str(error), where=CONFIG, hint="Remove the one that is wrong.") from error
    except ValueError as error:
        raise SourceError(f"is not a JSON object: {error}", where=CONFIG, hint=again) from error


def _check_content(value: object, depth: int = 0) -> None:
    """What can be read but not be copied and written again: half of a surrogate pair (``\\ud800``), nesting
    beyond any config's."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{value!r} is not valid Unicode") from None
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_content(key)
            _check_content(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check_content(inner, depth + 1)


def quantization_config(config: dict[str, Any]) -> dict[str, Any]:
    """The quantization_config, also where it is nested in text_config (kimi_k25); ``{}`` when there is none.

    Raises:
        SourceError: it is there but not an object, or has a number that JSON has not.
    """
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            value = place.get(key)
            if isinstance(value, dict):
                _check_finite(value, key)
                return value
            if value is not None:
                raise SourceError(f"{key} is a {type(value).__name__}, not an object", where=CONFIG)
    return {}


def _check_finite(value: dict[str, Any], key: str) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise SourceError(f"{key} holds NaN or Infinity", where=CONFIG, accepted="finite numbers") from error


def declared(config: dict[str, Any]) -> Declared:
    """What the config declares of scales.

    Raises:
        SourceError: the block size is not a pair of positive integers.
        UnsupportedError: several block sizes are declared.
    """
    quantization = quantization_config(config)
    blocks: set[tuple[int, int]] = set()
    strategies: set[str] = set()
    groups: set[int] = set()
    packed: set[int] = set()
    if (size := quantization.get("weight_block_size")) is not None:
        blocks.add(_pair(size, "quantization_config.weight_block_size"))
        strategies.add("block")
    for name, weights in _group_weights(quantization):
        strategy, bits = weights.get("strategy"), weights.get("num_bits")
        if weights.get("type") == "int":
            if type(bits) is int:
                packed.add(bits)
            size = weights.get("group_size")
            groups.add(size if type(size) is int and size > 0 else 0)
        elif bits == 8 and strategy in ("block", "channel", "tensor"):
            strategies.add(strategy)
            if strategy == "block":
                blocks.add(_pair(weights.get("block_structure"), f"config_groups.{name}.weights.block_structure"))
    if len(blocks) > 1:
        raise UnsupportedError(f"several block sizes are declared: {sorted(blocks)}", where=CONFIG, accepted="one")
    return Declared(
        blocks.pop() if blocks else FP8_BLOCK, frozenset(strategies), frozenset(groups), frozenset(packed)
    )


def _group_weights(quantization: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The ``weights`` arguments of compressed-tensors' config_groups."""
    groups = quantization.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            yield name, weights


def _pair(value: object, key: str) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2 and all(type(x) is int and x > 0 for x in value):
        return value[0], value[1]
    raise SourceError(
        f"{key} is {value!r}", where=CONFIG, accepted="two positive integers, for example [128, 128]"
    )
