"""What calibration knows of the inputs of one linear: H = sum over tokens of x x^T, or the tokens themselves.

An expert sees few tokens. While they are few against the columns, the tokens are kept as they are (a factor of H
with fewer rows), which costs less memory and lets GPTQ work in the space of the tokens (``factor.py``); beyond
that they are summed into the matrix. Sums are float32 over micro-batches of a fixed size in the order in which
tokens arrive, whatever the size of the pieces that the caller adds, so the same tokens always give the same bits
(on one machine and one number of torch threads: the sum inside a matrix product is the library's).

Tokens may count differently: row t of X counts ``counts[t]``, that is H = sum of counts[t] * x x^T. Calibration of
a routed expert passes the squares of its routing weights, because its output is multiplied by them.

Left out: sums across processes. Partial sums of floats depend on how tokens were divided; ranks divide experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quantkit.errors import SourceError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

MICRO_BATCH = 512  # tokens of one partial sum
_NORM_BLOCK = 512
LOW_RANK_RATIO = 4  # columns per token from which on the tokens are kept; see factor.py for why 4


class Hessian:
    """Second moment of the inputs ``[*, I]`` of a linear, before dampening and not divided by the token count.

    Attributes:
        columns: I.
        tokens: number of tokens added.
        where: what the inputs belong to, for errors ("model.layers.3.mlp.experts.7.gate_proj").
    """

    def __init__(self, columns: int, *, where: str, keep_tokens: int | None = None, device: str = "cpu") -> None:
        """
        Args:
            columns: I.
            where: named in errors.
            keep_tokens: keep up to this many tokens as they are; default I / LOW_RANK_RATIO, 0 never.
            device: torch device of everything here.
        """
        if columns < 1:
            raise UsageError(f"{columns} columns", where=where, accepted="1 or more")
        self.columns, self.where, self.tokens, self._device = columns, where, 0, device
        self._keep = columns // LOW_RANK_RATIO if keep_tokens is None else keep_tokens
        self._waiting: list[Tensor] = []  # tokens not yet summed: all of them while they are kept
        self._num_waiting = 0
        self._sum: Tensor | None = None
        self._fourth, self._rows = 0.0, 0  # sum of |x|^4, and of how many x, borrowed ones included

    def add(self, inputs: Tensor, counts: Tensor | None = None) -> None:
        """Add tokens.

        Args:
            inputs: ``[n, I]``, any float type; kept or summed in float32.
            counts: ``[n]``, not negative, what each token counts; None counts each 1.

        Raises:
            UsageError: another number of columns or counts.
            SourceError: inputs or counts are NaN or infinite; names the linear and the token.
        """
        import torch

        if inputs.ndim != 2 or inputs.shape[1] != self.columns:
            raise UsageError(
                f"inputs of shape {list(inputs.shape)}", where=self.where, accepted=f"[tokens, {self.columns}]"
            )
        x = inputs.detach().to(self._device, torch.float32)
        if counts is not None:
            if counts.shape != x.shape[:1]:
                raise UsageError(
                    f"{list(counts.shape)} counts for {x.shape[0]} tokens", where=self.where, accepted="one each"
                )
            x = x * counts.detach().to(self._device, torch.float32).sqrt().unsqueeze(1)  # NaN where negative
        self._refuse_non_finite(x)
        self.tokens += x.shape[0]
        self._rows += x.shape[0]
        self._fourth += float(torch.linalg.vector_norm(x, dim=1).double().pow(4).sum())
        self._waiting.append(x.clone() if x.data_ptr() == inputs.data_ptr() else x)
        self._num_waiting += x.shape[0]
        if self._sum is not None or self.tokens > self._keep:
            self._sum_whole_batches()

    @property
    def rows(self) -> Tensor | None:
        """The tokens ``[tokens, I]`` if they are kept, scaled so that rows^T rows is the Hessian; else None."""
        import torch

        if self._sum is not None or self.tokens > self._keep:
            return None
        if not self._waiting:
            return self._zeros(0)
        self._waiting = [torch.cat(self._waiting)]
        return self._waiting[0]

    def dense(self) -> Tensor:
        """The matrix ``[I, I]``, float32, symmetric; a new tensor."""
        import torch

        total = self._zeros(self.columns) if self._sum is None else self._sum.clone()
        if self._num_waiting:
            for part in _batches(torch.cat(self._waiting)):
                total.addmm_(part.T, part)
        return total

    def diagonal(self) -> Tensor:
        """``[I]``, float32: the energy of each column."""
        total = self._zeros() if self._sum is None else self._sum.diagonal().clone()
        for part in self._waiting:
            total = total + part.square().sum(0)
        return total

    def _zeros(self, *rows: int) -> Tensor:
        import torch

        return torch.zeros(*rows, self.columns, device=self._device)

    def shrinkage(self, gram: Tensor) -> float:
        """Share of the identity, 0 to 1, that estimates the second moment best from so few tokens.

        Ledoit and Wolf (2004): of all ``(1 - rho) H + rho mean(diag H) I`` the one with the least expected squared
        error, rho itself estimated from the tokens::

            rho = n / (n - 1) * (sum of |x|^4 - |H|^2 / n) / (|H|^2 - tr(H)^2 / I), between 0 and 1

        with n - 1 for the paper's n, since few tokens understate how far they scatter; a single one gives 1. It
        falls with the number of tokens, and rises where few of them carry the energy, be it by their size or by
        what they count.

        Args:
            gram: ``rows rows^T`` or ``dense()``, columns in any order: both have the same norm and trace.
        """
        import torch

        squared = float(torch.linalg.vector_norm(gram, dim=1).double().square().sum())  # no copy of gram
        spread = squared - float(gram.diagonal().double().sum()) ** 2 / self.columns
        n = self._rows
        if spread <= 0.0 or n < 2:
            return 1.0
        return min(max((self._fourth - squared / n) * n / (n - 1) / spread, 0.0), 1.0)

    def norms(self, errors: Tensor) -> Tensor:
        """e H e^T, float64 ``[O]``, of errors ``[O, I]``: squared error of each output over the tokens."""
        import torch

        rows = self.rows
        if rows is not None:
            return (errors @ rows.to(errors.device).T).square_().sum(1, dtype=torch.float64)
        matrix = self.dense().to(errors.device)
        total = errors.new_zeros(errors.shape[0], dtype=torch.float64)
        for start in range(0, self.columns, _NORM_BLOCK):  # H is symmetric: what is left of the diagonal twice
            stop = min(start + _NORM_BLOCK, self.columns)
            product = errors[:, :start] @ matrix[:start, start:stop]
            product = product.mul_(2).addmm_(errors[:, start:stop], matrix[start:stop, start:stop])
            total += product.mul_(errors[:, start:stop]).sum(1, dtype=torch.float64)
        return total.clamp_(min=0)

    def scaled(self, factors: Tensor) -> Hessian:
        """The Hessian of inputs that are multiplied by ``factors`` ``[I]``."""
        scaled = Hessian(self.columns, where=self.where, keep_tokens=self._keep, device=self._device)
        factors = factors.to(self._device)
        scaled.tokens, scaled._num_waiting = self.tokens, self._num_waiting
        scaled._waiting = [part * factors for part in self._waiting]
        before = self.diagonal()
        share = float((before * factors.square()).sum() / before.sum().clamp(min=1e-30))
        scaled._rows = self._rows
        scaled._fourth = self._fourth * share**2  # exact for equal factors; the tokens themselves may be gone
        if self._sum is not None:
            scaled._sum = self._sum * factors * factors.unsqueeze(1)
        return scaled

    def shrunk(self, average: Hessian, min_tokens: int) -> Hessian:
        """This Hessian for a starved expert: missing tokens are made up by average ones of the layer.

        With n tokens of its own, m = ``min_tokens``, and the average over the N tokens of ``average``::

            H' = H + (m - n) / N * H_average        for n < m; H itself otherwise

        so 0 tokens give a multiple of the average alone (a factor changes nothing in GPTQ), and the weight of the
        average falls linearly until the expert has m tokens. Both may be kept tokens or matrices.

        Args:
            average: inputs of the same linear for tokens of the whole layer: for gate and up any sample of them,
                for down the same sample sent through this expert's gate and up.
            min_tokens: m.

        Raises:
            UsageError: the average has no tokens or other columns.
        """
        missing = min_tokens - self.tokens
        if missing <= 0:
            return self
        if average.columns != self.columns or average.tokens == 0:
            raise UsageError(
                f"average of {average.tokens} tokens with {average.columns} columns",
                where=self.where,
                accepted=f"one or more tokens with {self.columns} columns",
            )
        share = missing / average.tokens
        own, others = self.rows, average.rows
        keep = self.tokens + average.tokens if own is not None and others is not None else 0
        mixed = Hessian(self.columns, where=self.where, keep_tokens=keep, device=self._device)
        mixed.tokens = self.tokens
        mixed._fourth, mixed._rows = self._fourth + share**2 * average._fourth, self._rows + average._rows
        if own is not None and others is not None:
            mixed._waiting = [own, others.to(self._device) * share**0.5]
            mixed._num_waiting = keep
        else:
            mixed._sum = average.dense().mul_(share).to(self._device).add_(self.dense())
        return mixed

    def _sum_whole_batches(self) -> None:
        import torch

        if self._num_waiting < MICRO_BATCH and self._sum is not None:
            return
        waiting = torch.cat(self._waiting)
        if self._sum is None:
            self._sum = self._zeros(self.columns)
        whole = waiting.shape[0] // MICRO_BATCH * MICRO_BATCH
        for part in _batches(waiting[:whole]):
            self._sum.addmm_(part.T, part)
        rest = waiting[whole:].clone()
        self._waiting, self._num_waiting = ([rest] if rest.shape[0] else []), rest.shape[0]

    def _refuse_non_finite(self, x: Tensor) -> None:
        import torch

        good = torch.isfinite(x).all(1)
        if not bool(good.all()):
            bad = int((~good).nonzero()[0])
            column = int((~torch.isfinite(x[bad])).nonzero()[0])
            raise SourceError(
                f"input of token {self.tokens + bad} is {float(x[bad, column])} in column {column}",
                where=self.where,
                accepted="finite activations",
                hint="Activations overflow before this layer, or the source weights are damaged.",
            )


def _batches(tokens: Tensor) -> Iterator[Tensor]:
    return (tokens[start : start + MICRO_BATCH] for start in range(0, tokens.shape[0], MICRO_BATCH))
