"""Recipe files that are wrong: one error each, exit code 2, with file, line and a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.errors import RecipeError
from quantkit.recipe.load import load_recipe

HEAD = b"schema_version: 1\nname: x\n"


def refused(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert caught.value.exit_code == 2
    assert str(path) in str(caught.value)
    return str(caught.value).replace(str(path), "FILE")


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "FILE:1: an empty file"),
        (b"- a\n- b\n", "FILE:1: a list where a mapping is expected"),
        (b"just text", "FILE:1: a str where a mapping is expected"),
        (b"name: x\n\xff\n", "FILE:2: not UTF-8 text: byte 0xff"),
        (b"a: [1,\n", "FILE:2: not valid YAML"),
        (HEAD + b"name: y\n", "FILE:3: duplicate key 'name', first on line 2"),
        (HEAD + b"decode:\n  method: mse\n  method: rtn\n", "FILE:5: duplicate key 'decode.method', first on"),
        (HEAD + b"1: 2\n", "FILE:3: the key '1' is not text"),
        (HEAD + b"[a]: 2\n", "FILE:3: the key"),
        (HEAD + b"decode: !!python/object/apply:os.system ['true']\n", "FILE:3: not valid YAML"),
        (b"&a {decode: *a}\n", "an alias repeats"),
        (HEAD + b"description: 2025-13-45\n", "not valid YAML"),
        (b"schema_version: 2\nname: x\n", "line 1: schema_version: 2 is not accepted; accepted: 1"),
        (b"name: x\n", "schema_version: is missing"),
        (HEAD + b"decode: 3\n", "line 3: decode"),
        (HEAD + b"decode:\n  group_size: 48\n", "line 4: decode.group_size: 48 is not accepted; accepted: 32,"),
        (HEAD + b"decode:\n  grop_size: 3\n", "line 4: decode.grop_size: unknown key. Did you mean 'group_size'"),
        (HEAD + b"decode:\n  scheme: nvfp5\n", "unknown decode scheme 'nvfp5'; known: int4"),
        (HEAD + b"decode:\n  layers: 9-3\n", "the range 9-3 runs backwards"),
        (HEAD + b"decode:\n  quantize: ['(']\n", "'(' is not a regular expression"),
        (HEAD + b"decode:\n  force: true\n", "decode.force: unknown key"),
        (HEAD + b"output:\n  max_shard_size: 10G\n", "10GB (powers of 1000) or 10GiB (powers of 1024)"),
        (HEAD + b"output:\n  max_shard_size: -1GB\n", "not a size"),
        (HEAD + b"name: \xef\xbb\xbf\n", "duplicate key"),
        (b"[" * 5_000, "not valid YAML"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, content: bytes, says: str) -> None:
    assert says in refused(tmp_path, content)


def test_all_errors_at_once(tmp_path: Path) -> None:
    message = refused(
        tmp_path, HEAD + b"sorce: {}\ndecode:\n  method: best\n  rest: int8\nprefill:\n  plaec: copy\n"
    )
    assert "4 problems" in message
    for part in ("Did you mean 'source'", "decode.method: 'best'", "decode.rest: 'int8'", "Did you mean 'place'"):
        assert part in message


def test_aliases_cannot_blow_up(tmp_path: Path) -> None:
    lines = [b"a0: &a0 {x: 1}"] + [b"a%d: &a%d {x: *a%d, y: *a%d}" % (i, i, i - 1, i - 1) for i in range(1, 60)]
    assert "an alias repeats" in refused(tmp_path, b"\n".join(lines))


def test_a_weight_file_given_by_mistake(tmp_path: Path) -> None:
    assert "too many for a recipe" in refused(tmp_path, b"\0" * (2 << 20))


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path)
