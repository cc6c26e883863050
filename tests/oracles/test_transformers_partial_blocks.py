"""Why transformers' own FP8 path is no oracle here: it is wrong where a block is partial.

transformers 5.17 on a CPU dequantizes block FP8 with a block size that it derives from the shapes of weight and
scale (``Fp8Dequantize._dequantize_one`` in ``integrations/finegrained_fp8.py``). With 144 rows and 2 scale rows it
takes blocks of 72 rows instead of 128 and 16, without a word; with 576 rows and 5 scale rows it refuses. If a
newer transformers is right, these tests fail, and the notes that name the version can go.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import quantkit_kernels as kernels
from quantkit.checkpoint import open_checkpoint
from quantkit.data import bundled_model
from quantkit_evals.dequantized import write_bf16_copy
from quantkit_evals.models import load_model

from . import e4m3

PARTIAL = "self_attn.kv_a_proj_with_mqa"


def test_names_the_version():
    assert transformers.__version__.startswith("5.17."), "look at the new version, then at the docstring above"


def test_loads_only_partial_blocks_wrong(tmp_path):
    """Through from_pretrained: every kv_a_proj is 10 % to 28 % off; all other weights equal our dequantizer's."""
    theirs = dict(load_model(bundled_model("tiny-glm")).named_parameters())
    ours = dict(load_model(write_bf16_copy("tiny-glm", tmp_path / "bf16")).named_parameters())
    assert theirs.keys() == ours.keys()
    wrong = {}
    for name, mine in ours.items():
        if not torch.equal(theirs[name], mine):
            wrong[name] = ((theirs[name].float() - mine.float()).norm() / mine.float().norm()).item()
    assert set(wrong) == {f"model.layers.{i}.{PARTIAL}.weight" for i in range(6)}
    assert all(0.10 < error < 0.28 for error in wrong.values()), wrong


def test_plain_loop_sides_with_us():
    """On one such weight our kernel equals a loop with row // 128, transformers equals one with row // 72."""
    with open_checkpoint("tiny-glm") as checkpoint:
        weight = checkpoint.weight(f"model.layers.0.{PARTIAL}")
        codes, scales = checkpoint.array(weight.weight), checkpoint.array(weight.scale)
    assert codes.shape == (144, 256)
    assert scales.shape == (2, 2)
    table = np.array([e4m3.decode(c) for c in range(256)], dtype=np.float32)

    def loop(block_rows):
        return np.stack([table[row] * np.repeat(scales[i // block_rows], 128) for i, row in enumerate(codes)])

    theirs = Fp8Dequantize(None)._dequantize_one(
        torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales), torch.float32
    )
    assert np.array_equal(kernels.fp8_to_float32(codes, scales, (128, 128)), loop(128))
    assert np.array_equal(theirs.numpy(), loop(72))
    assert not np.array_equal(theirs.numpy(), loop(128))


def test_refuses_the_published_shape():
    """576 rows with 5 scale rows, as in every published MLA model."""
    codes, scales = torch.zeros(576, 128, dtype=torch.float8_e4m3fn), torch.ones(5, 1)
    with pytest.raises(ValueError, match="not divisible"):
        Fp8Dequantize(None)._dequantize_one(codes, scales)
    assert kernels.fp8_to_float32(codes.view(torch.uint8).numpy(), scales.numpy(), (128, 128)).shape == (576, 128)
