"""Train a tiny Mixture-of-Experts language model on a CPU (GLM-5.2 or Qwen3-MoE architecture) from plain text.

    python -m tools.train_tiny --arch glm --text prose.txt --out trained --minutes 60

Writes ``trained/bf16/`` (Hugging Face layout), ``trained/mtp.safetensors`` (GLM: the MTP layer) and
``trained/train.json``. ``tools.export_fp8`` then makes the FP8 checkpoint. The bundled ``tiny-glm`` took 9.6
million tokens and ``tiny-qwen3`` 5.9 million, in about an hour each on two cores. The budget is time, so a
retraining is not bit-equal.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from . import indexer
from .lean_forward import Routing, losses
from .tiny_models import ARCHITECTURES, BUNDLED, SMOKE, Mtp, make_config, make_model
from .tiny_tokenizer import encode, train_tokenizer

Tensor = torch.Tensor
DENSE_TOPK = 1 << 20  # more than any context: the DSA layers attend to everything


class Batches:
    """Random windows of a token stream, from a seeded generator."""

    def __init__(self, stream: Tensor, seed: int) -> None:
        self.stream, self.generator = stream, torch.Generator().manual_seed(seed)

    def __call__(self, size: int, positions: int) -> Tensor:
        """Token ids ``[size, positions + 2]``."""
        starts = torch.randint(0, len(self.stream) - positions - 2, (size,), generator=self.generator)
        return torch.stack([self.stream[i : i + positions + 2] for i in starts.tolist()])


def validation_loss(model: Any, stream: Tensor, args: argparse.Namespace) -> float:
    """Mean next-token loss of transformers' own forward on fixed windows."""
    batch, total, rounds = Batches(stream, 1), 0.0, 8
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(rounds):
            x = batch(args.batch, args.seq)[:, :-1]
            logits = model(x[:, :-1]).logits.float()
            total += F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).item()
    model.train()
    return total / rounds


def learning_rate(peak: float, step: int, progress: float) -> float:
    """Linear warm-up over 200 steps, constant until half of the budget, then linear to 2 %."""
    return peak * min(1.0, (step + 1) / 200) * (1.0 if progress < 0.5 else max(0.02, 2 - 2 * progress))


def train(model: Any, mtp: Mtp | None, stream: Tensor, args: argparse.Namespace) -> int:
    """Train in place until the budget (minutes or steps) is used; returns the number of steps."""
    parameters = [*model.parameters(), *(mtp.parameters() if mtp else ())]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    batch, start, step = Batches(stream, args.seed), time.monotonic(), 0
    model.train()
    while True:
        seconds = time.monotonic() - start
        progress = step / args.steps if args.steps else seconds / (args.minutes * 60)
        if progress >= 1:
            return step
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args.lr, step, progress)
        routing = Routing()
        use_mtp = mtp if progress > 0.7 or (args.steps and step + 1 == args.steps) else None  # late: it is cheap
        loss, extra = losses(model, use_mtp, batch(args.batch, args.seq), routing)
        (loss + (0.3 if mtp else 0.01) * extra).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():  # auxiliary-loss-free balancing of the sigmoid routers
            for router, counts in routing.counts.items():
                router.e_score_correction_bias += 1e-3 * torch.sign(counts.mean() - counts)
        if step % 50 == 0:
            print(f"{step} {seconds:.0f} s loss {loss.item():.3f} extra {extra.item():.3f}", flush=True)
        step += 1


def save(model: Any, mtp: Mtp | None, tokenizer: Any, out: Path) -> None:
    """Write BF16 weights; the correction biases stay float32, since BF16 reroutes tokens."""
    from safetensors.torch import save_file

    biases = {name: b.detach().clone() for name, b in _state(model).items() if "e_score_correction_bias" in name}
    model.bfloat16()
    for name, value in biases.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, value)
    model.save_pretrained(str(out / "bf16"))
    tokenizer.save_pretrained(str(out / "bf16"))
    if mtp:
        state = {k: v if "e_score" in k else v.bfloat16() for k, v in _state(mtp).items()}
        save_file(state, out / "mtp.safetensors", metadata={"format": "pt"})


def _state(module: torch.nn.Module) -> dict[str, Tensor]:
    return {k: v.detach() for k, v in module.state_dict().items()}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=ARCHITECTURES, default="glm")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8, documents separated by empty lines")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--index-minutes", type=float, default=5, help="GLM: for the DSA indexers")
    parser.add_argument("--steps", type=int, default=0, help="a number of steps instead of minutes, for a test")
    parser.add_argument("--smoke", action="store_true", help="a much smaller model, for a test")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--validation-tokens", type=int, default=80_000)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    size = SMOKE if args.smoke else BUNDLED
    tokenizer = train_tokenizer(args.text, args.out / "tokenizer", size.vocab)
    stream = encode(tokenizer, args.text)
    held_out, stream = stream[-args.validation_tokens :], stream[: -args.validation_tokens]
    config = make_config(args.arch, len(tokenizer), size)
    topk = getattr(config, "index_topk", None)
    if topk:
        config.index_topk = DENSE_TOPK
    model, mtp = make_model(args.arch, config)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(stream)} tokens", flush=True)
    steps = train(model, mtp, stream, args)
    log = {"steps": steps, "validation_loss": validation_loss(model, held_out, args)}
    if mtp:
        batch = Batches(stream, args.seed + 1)
        positions = min(384, 2 * args.seq)
        indexer.warm_up(
            model, mtp, lambda: batch(8, positions), minutes=args.index_minutes, max_steps=args.steps or None
        )
        model.config.index_topk = topk
        for layer in [*model.model.layers, mtp.layer]:
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.index_topk = topk
        log["validation_loss_sparse"] = validation_loss(model, held_out, args)
    print(f"perplexity {math.exp(log['validation_loss']):.1f}", flush=True)
    save(model, mtp, tokenizer, args.out)
    (args.out / "train.json").write_text(
        json.dumps(log | {"args": {k: str(v) for k, v in vars(args).items()}}, indent=1)
    )


if __name__ == "__main__":
    main()
