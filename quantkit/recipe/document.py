"""A YAML (or JSON, which is YAML) document that people write, read strictly: recipes, gates, tasks.

YAML's freedoms that hide mistakes are closed here: duplicate keys are errors (the last one would win silently),
and only plain mappings of the safe loader are accepted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ..errors import RecipeError, UsageError
from .errors import Path as KeyPath

MAX_BYTES = 1 << 20  # such a file is a page of text; anything bigger is the wrong file


def read_bytes(path: Path, *, noun: str = "recipe", error: type[UsageError] = RecipeError) -> bytes:
    """The bytes of a file that should be a page of text; raises ``error`` if it can't be read or is too big."""
    try:
        with open(path, "rb") as handle:  # the size is not asked for: a pipe or device states none
            data = handle.read(MAX_BYTES + 1)
    except OSError as problem:
        raise error(f"cannot be read: {problem.strerror}", where=str(path)) from None
    if len(data) > MAX_BYTES:
        raise error(f"more than {MAX_BYTES:,} bytes are too many for a {noun}", where=str(path))
    return data


def parse_mapping(
    data: bytes, *, where: str, error: type[UsageError] = RecipeError
) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The mapping that a document holds, and the line of each of its key paths.

    Raises:
        UsageError: (``error``) not UTF-8, not YAML, no mapping, duplicate keys, keys that are no text, or aliases
            of mappings.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise error(f"not UTF-8 text: byte 0x{data[problem.start]:02x}", where=f"{where}:{line}") from None
    lines: dict[KeyPath, int] = {}
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is not None:
                _Keys(lines, where, error).check(node, ())
            plain = loader.construct_document(node) if node is not None else None
        finally:
            loader.dispose()
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        at = f"{where}:{mark.line + 1}" if mark else where
        raise error(f"not valid YAML: {getattr(problem, 'problem', None) or problem}", where=at) from None
    except (ValueError, RecursionError) as problem:  # an impossible date, nesting without end
        raise error(f"not valid YAML: {problem}", where=where) from None
    if not isinstance(plain, dict):
        seen = "an empty file" if plain is None else f"a {type(plain).__name__}"
        raise error(f"{seen} where a mapping is expected", where=f"{where}:1", accepted="keys and values")
    return plain, lines


class _Keys:
    """Records the line of every key; refuses duplicates, keys that are not text, and aliases of mappings.

    Aliases can nest a page into more keys than memory holds, and no document needs them.
    """

    def __init__(self, lines: dict[KeyPath, int], where: str, error: type[UsageError]) -> None:
        self.lines, self.where, self.error = lines, where, error
        self.seen: set[int] = set()

    def check(self, node: yaml.Node, path: KeyPath) -> None:
        if isinstance(node, yaml.SequenceNode) and id(node) not in self.seen:
            self.seen.add(id(node))
            for index, value in enumerate(node.value):
                self.lines[(*path, index)] = value.start_mark.line + 1
                self.check(value, (*path, index))
        if not isinstance(node, yaml.MappingNode):
            return
        if id(node) in self.seen:
            raise self.error("an alias repeats this mapping", where=self._at(node))
        self.seen.add(id(node))
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise self.error(f"the key {getattr(key, 'value', '?')!r} is not text", where=self._at(key))
            here = (*path, key.value)
            if here in self.lines:
                first = self.lines[here]
                raise self.error(
                    f"duplicate key {'.'.join(map(str, here))!r}, first on line {first}", where=self._at(key)
                )
            self.lines[here] = key.start_mark.line + 1
            self.check(value, here)

    def _at(self, node: yaml.Node) -> str:
        return f"{self.where}:{node.start_mark.line + 1}"
