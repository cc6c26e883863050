"""Blocks are deterministic, disjoint, spread over the text, and decode back to it."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from quantkit.data import bundled_model, bundled_text
from quantkit.errors import ArtifactError, UsageError
from quantkit_evals.text import token_blocks

GLM = bundled_model("tiny-glm")


def test_all_blocks_give_the_text_back():
    blocks = token_blocks(GLM, "heldout", block_tokens=64)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(GLM)
    documents = bundled_text("heldout").read_text(encoding="utf-8").split("\n\n")
    expected = tokenizer.eos_token.join(documents) + tokenizer.eos_token
    decoded = tokenizer.decode(blocks.reshape(-1), clean_up_tokenization_spaces=False)
    # the last, partial block is left out; its first character may have been cut
    assert expected.startswith(decoded.rstrip("\ufffd"))
    assert len(decoded) > len(expected) - 64 * 20


def test_a_bounded_number_is_spread_evenly_and_the_same_each_time():
    every = token_blocks(GLM)
    some = token_blocks(GLM, num_blocks=5)
    assert some.shape == (5, 256)
    assert some.dtype == np.int64
    where = [next(k for k, block in enumerate(every) if np.array_equal(block, one)) for one in some]
    assert where == [k * len(every) // 5 for k in range(5)]
    assert np.array_equal(some, token_blocks(GLM, num_blocks=5))


def test_both_models_see_the_same_tokens():
    assert np.array_equal(token_blocks(GLM, num_blocks=3), token_blocks(bundled_model("tiny-qwen3"), num_blocks=3))


def test_a_file_of_the_user(tmp_path):
    (tmp_path / "own.txt").write_text("word " * 500, encoding="utf-8")
    assert token_blocks(GLM, tmp_path / "own.txt", num_blocks=2, block_tokens=16).shape == (2, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 10_000}, "10000 wanted"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"block_tokens": 1}, "2 or more"),
        ({"text": "no-such-text"}, "calib, heldout|heldout, calib"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(UsageError, match=message):
        token_blocks(GLM, **options)


def test_no_tokenizer(tmp_path):
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        token_blocks(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_was_cut_short(tmp_path, name):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GLM / file, tmp_path / file)
    (tmp_path / name).write_bytes((GLM / name).read_bytes()[:50])
    with pytest.raises(ArtifactError, match="its tokenizer can't be loaded"):
        token_blocks(tmp_path)
