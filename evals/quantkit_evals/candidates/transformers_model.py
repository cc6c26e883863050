"""A model of transformers as a candidate, by lm-eval's own ``hf`` model: the reference outside of our engine.

It scores by prefill. Quantized weights are loaded through a BF16 copy (``dequantized``), since transformers runs
FP8 blocks on few devices; the copy is what is evaluated, whatever arithmetic is used. It enforces no JSON schema.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..extras import require
from ..tokenizer import load_tokenizer
from .candidate import OnProgress, TaskPath
from .digests import digests, files_state, is_artifact, view_folders
from .generation import Prompt
from .pair import NotFinite, Pair, Scored, check_vocabulary

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM

    from quantkit_serve.start.servable import Servable

_AT_ONCE = 16  # batches: answers are kept after so many


class TransformersCandidate:
    """See ``Candidate``; the model is loaded when it is first needed.

    Args:
        model: a checkpoint that transformers loads, or an artifact.
        dtype: of the arithmetic.
        view: of an artifact.
        batch_size: as lm-eval's.
    """

    path: TaskPath = "prefill"

    def __init__(
        self,
        model: Servable,
        *,
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        view: Literal["prefill", "decode"] = "prefill",
        label: str | None = None,
        batch_size: int = 8,
    ) -> None:
        self.model, self.dtype, self.view, self.batch_size = model, dtype, view, batch_size
        self.label = label or f"transformers, {dtype}"
        self._folder = model.folder / view if is_artifact(model.folder) else model.folder
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def identity(self) -> dict[str, Any]:
        found: dict[str, Any] = {"label": self.label, "kind": "transformers", "model": self.model.name,
                                 "dtype": self.dtype}  # fmt: skip
        if self._folder != self.model.folder:
            found["view"] = self.view
        versions = {name: version(name) for name in ("transformers", "torch", "lm-eval")}
        return found | digests(self.model.folder) | {"versions": versions}

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self._folder)

    @cached_property
    def _lm(self) -> Any:
        """lm-eval's model.

        Raises:
            SourceError: weights that are missing or unknown to transformers.
        """
        require("lm_eval")
        from lm_eval.models.huggingface import HFLM

        from ..models import load_model

        model = load_model(self._loadable(), dtype=self.dtype)
        log = logging.getLogger("lm_eval")
        level = log.level
        log.setLevel(logging.ERROR)  # it warns that a model was loaded before
        try:
            return HFLM(pretrained=model, tokenizer=self.tokenizer, batch_size=self.batch_size)
        finally:
            log.setLevel(level)

    def _loadable(self) -> Path:
        from ..dequantized import write_bf16_copy

        config = json.loads((self._folder / "config.json").read_text(encoding="utf-8"))
        if "quantization_config" not in config:
            return self._folder
        self._scratch = tempfile.TemporaryDirectory(prefix="quantkit-eval-")
        return write_bf16_copy(self._folder, Path(self._scratch.name, "bf16"))

    @property
    def max_length(self) -> int:
        return int(self._lm.max_length)

    def state(self) -> str:
        return files_state(*view_folders(self.model.folder))

    def refusal(self, pair: Pair) -> str | None:
        needed = pair.num_tokens - 1
        return None if needed <= self.max_length else f"{needed} tokens, the model takes {self.max_length}"

    def refusal_of_prompt(self, prompt: Prompt) -> str | None:
        answer = prompt.generation.max_tokens
        if len(prompt.tokens) + answer > self.max_length:
            return f"{len(prompt.tokens)} tokens and an answer of {answer}, the model takes {self.max_length}"
        return None

    def score(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, Scored]]:
        check_vocabulary(pairs, self._lm.model.get_input_embeddings().num_embeddings)
        order = sorted(range(len(pairs)), key=lambda i: (-pairs[i].num_tokens, pairs[i].context))
        step = self.batch_size * _AT_ONCE
        for start in range(0, len(order), step):
            some = order[start : start + step]
            asked = [(None, list(pairs[i].context), list(pairs[i].continuation)) for i in some]
            found = self._lm._loglikelihood_tokens(asked, disable_tqdm=True)
            for index, (logprob, is_greedy) in zip(some, found, strict=True):
                if not math.isfinite(logprob):
                    raise NotFinite(index, 0)
                yield index, Scored(logprob, is_greedy)

    def generate(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, str]]:
        import torch
        from lm_eval.api.instance import Instance

        for index, prompt in enumerate(prompts):
            torch.manual_seed(prompt.seed)
            arguments = {name: value for name, value in prompt.arguments.items() if name != "json_schema"}
            request = Instance("generate_until", {}, (prompt.text, arguments), 0, ("", index, 1))
            (text,) = self._lm.generate_until([request], disable_tqdm=True)
            yield index, text

    def lm(self, *, cache: Path | None = None, on_progress: OnProgress = lambda _: None) -> TemplateLM:
        from ..harness.lm_eval_model import HarnessModel

        return HarnessModel(self, cache=cache, on_progress=on_progress)
