"""llm-compressor, driven in this process: the only module that imports it.

Its own modifier runs on a BF16 copy of the source in memory, with its own experts (it replaces the fused module of
transformers by linears), its own pipeline and defaults; what is given are targets, group size, dampening, how
layers propagate, and the token ids. Every expert sees all tokens (``moe_calibrate_all_experts``, its default): it
sets the weights of an expert without tokens to zero otherwise. Results are taken from the model; nothing is saved.

AutoRound at its defaults, but without torch.compile, which changes no meaning and needs a compiler. Left out: AWQ
(its scales are kept in private state and folded into bfloat16 weights, from where they can't be had exactly),
several group sizes in one run, anything but routed experts.

What it says goes nowhere: it writes to stdout, which is quantkit's data. Problems come out as errors.
"""

from __future__ import annotations

import io
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EnvironmentProblem, QuantkitError, SourceError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PACKAGE = "llmcompressor"
OLDEST = (0, 14)
SEED = 0
Key = tuple[int, int, str]  # layer, expert, gate or up or down
_TALKATIVE = (PACKAGE, "compressed_tensors", "auto_round")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_HINT = "Run: pip install 'quantkit[llmcompressor]', in an environment of its own if it disagrees with others."


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What llm-compressor is to do.

    Attributes:
        model: directory of a BF16 checkpoint in the Hugging Face layout.
        token_ids: int64 ``[samples, length]``.
        targets: the weights to quantize.
        method: ``gptq`` or ``autoround``.
        percdamp, propagate_quantized: of GPTQ; AutoRound has no use for them.
    """

    model: Path
    token_ids: NDArray[np.int64]
    targets: frozenset[Key]
    method: str
    group_size: int
    percdamp: float
    propagate_quantized: bool


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """One weight as llm-compressor leaves it.

    Attributes:
        values: float32 ``[O, I]``, dequantized.
        scale: bfloat16 bits ``[O, G]``.
        is_fallback: GPTQ could not factorise its Hessian and rounded to nearest.
    """

    key: Key
    values: NDArray[np.float32]
    scale: NDArray[np.uint16]
    is_fallback: bool


def engine_label(method: str) -> str:
    """Name and version of what quantizes, as the manifest states it.

    Raises:
        EnvironmentProblem: not installed, or too old.
    """
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in (PACKAGE, *(("auto-round",) if method == "autoround" else ())):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            raise EnvironmentProblem(
                f"{package} is not installed", where="--engine llmcompressor", hint=_HINT
            ) from None
    numbers = tuple(int(n) for n in re.findall(r"\d+", found[0])[:2])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise EnvironmentProblem(
            f"{found[0]} is too old", where="--engine llmcompressor", accepted=f"{oldest} or newer", hint=_HINT
        )
    return ", ".join(found)


def quantize(task: Task) -> Iterator[Rounded]:
    """Load the model, run the modifier over all samples, and hand out the weights.

    Raises:
        SourceError: weights missing, or activations that are not finite.
        UnsupportedError: llm-compressor or transformers can't run this model.
        EnvironmentProblem: memory.
    """
    fallbacks: set[str] = set()
    with _hushed():
        model = _load(task.model)
        modules = _modules(model, task.targets)
        _check_activations(model, task.token_ids)
        _seed()
        _run(model, task, frozenset(modules.values()), fallbacks)
    for key, name in modules.items():
        yield _take(model.get_submodule(name), key, name in fallbacks)


def _load(folder: Path) -> Any:
    """The model in bfloat16, its experts as linears; strict, since transformers fills gaps with random numbers."""
    import torch
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.bfloat16, output_loading_info=True, local_files_only=True
        )
    except ValueError as problem:  # transformers has no such model
        raise UnsupportedError(
            f"transformers cannot load it: {problem}",
            where="--engine llmcompressor",
            hint="Use --engine quantkit.",
        ) from problem
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, report[kind])):
            raise SourceError(
                f"{len(names)} weights: {kind.replace('_', ' ')}, first {names[0]}", where="the source"
            )
    return linearize_moe(model.eval())


def _modules(model: Any, targets: frozenset[Key]) -> dict[Key, str]:
    """Where each target is in the model, in the model's order.

    Raises:
        UnsupportedError: one is not there.
    """
    from llmcompressor.modeling.moe.linearize import get_linearized_moes

    found: dict[Key, str] = {}
    for name, experts in get_linearized_moes(model):
        layer = _LAYER.search(f"{name}.")
        for expert in range(experts.num_experts) if layer else ():
            for projection in ("gate", "up", "down"):
                path = f"{name}.{expert}.{projection}_proj"
                if layer and hasattr(experts[expert], f"{projection}_proj"):
                    found[int(layer[1]), expert, projection] = path
    if missing := sorted(targets - found.keys()):
        layer_number, expert, projection = missing[0]
        raise UnsupportedError(
            f"llm-compressor has no linear for {projection} of expert {expert}", where=f"layer {layer_number}",
            hint="Use --engine quantkit.",
        )  # fmt: skip
    return {key: name for key, name in found.items() if key in targets}


def _check_activations(model: Any, token_ids: NDArray[np.int64]) -> None:
    """llm-compressor rounds to nearest where a Hessian is NaN; a model that overflows is refused before."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(token_ids[:1])).logits
    if not torch.isfinite(logits).all():
        raise SourceError(
            "activations that are NaN or infinite", where="the model, run in bfloat16",
            hint="The source is damaged, or needs a wider range than bfloat16: use --engine quantkit.",
        )  # fmt: skip


def _run(model: Any, task: Task, names: frozenset[str], fallbacks: set[str]) -> None:
    from llmcompressor import oneshot

    try:
        oneshot(
            model=model, recipe=[_modifier(model, task, names, fallbacks)], dataset=_batches(task.token_ids),
            processor=object(),  # it would load a tokenizer that token ids have no use for
            num_calibration_samples=len(task.token_ids), shuffle_calibration_samples=False,
            moe_calibrate_all_experts=True, propagate_error=task.propagate_quantized,
        )  # fmt: skip
    except (QuantkitError, MemoryError):
        raise
    except Exception as problem:  # a foreign program: it raises what it likes
        raise UnsupportedError(
            f"llm-compressor failed: {type(problem).__name__}: {problem}", where=f"its {task.method}",
            hint="Run again with -v for the traceback, or use --engine quantkit.",
        ) from problem  # fmt: skip


def _modifier(model: Any, task: Task, names: frozenset[str], fallbacks: set[str]) -> Any:
    """The modifier with its defaults, aimed at the targets only."""
    import torch

    weights = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": task.group_size,
    }  # fmt: skip
    if task.method == "gptq":
        from llmcompressor.modifiers.gptq import GPTQModifier

        class Observed(GPTQModifier):  # type: ignore[misc]
            """Tells which modules were only rounded, which GPTQModifier logs and forgets."""

            def on_finalize(self, state: Any, **kwargs: Any) -> bool:
                fallbacks.update(self._rtn_fallback_module_names)
                return bool(super().on_finalize(state, **kwargs))

        groups = {"experts": {"targets": sorted(names), "weights": weights}}
        return Observed(config_groups=groups, dampening_frac=task.percdamp)
    from llmcompressor.modifiers.autoround import AutoRoundModifier

    # auto-round quantizes every linear of a layer that is not named here: name all, ignore the others. It keeps
    # the dense MLPs of some models by names such as layers.0.mlp, and every layer it is handed is called layers.0.
    if hasattr(model.config, "first_k_dense_replace"):
        model.config.first_k_dense_replace = 0
    others = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n not in names]
    groups = {"experts": {"targets": ["Linear"], "weights": weights}}
    return AutoRoundModifier(config_groups=groups, ignore=others, enable_torch_compile=False)


def _batches(token_ids: NDArray[np.int64]) -> Any:
    """One sample at a time, in order, as llm-compressor does by default."""
    import torch

    ids = torch.from_numpy(token_ids)
    samples = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    return torch.utils.data.DataLoader(samples, batch_size=1)  # type: ignore[arg-type]


def _take(module: Any, key: Key, is_fallback: bool) -> Rounded:
    import torch

    where = "layer {}, expert {}, {}".format(*key)
    if getattr(module, "weight_scale", None) is None:
        raise UnsupportedError(
            "llm-compressor left a weight as it is", where=where, accepted="a model whose experts it quantizes",
            hint="Use --engine quantkit.",
        )  # fmt: skip
    scale = module.weight_scale.detach().cpu()
    if scale.dtype is not torch.bfloat16:
        raise EnvironmentProblem(
            f"llm-compressor returned scales of {scale.dtype}", where=where, accepted="bfloat16", hint=_HINT
        )
    values = module.weight.detach().float().cpu().numpy()
    return Rounded(key, values, scale.contiguous().view(torch.int16).numpy().view("<u2"), is_fallback)


def _seed() -> None:
    """AutoRound draws its batches at random."""
    import numpy as np
    import torch

    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


@contextmanager
def _hushed() -> Iterator[None]:
    """Nothing on stdout and stderr, and the loggers as they were."""
    import importlib
    import logging

    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            importlib.import_module(PACKAGE)
            loguru: Any = importlib.import_module("loguru")
        except ImportError as problem:
            raise EnvironmentProblem(
                f"llm-compressor cannot be imported: {problem}", where="--engine llmcompressor", hint=_HINT
            ) from problem
        before = logging.root.manager.disable
        for package in _TALKATIVE:
            loguru.logger.disable(package)
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(before)
            for package in _TALKATIVE:
                loguru.logger.enable(package)
