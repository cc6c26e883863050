"""What is kept of one request: when each piece of the answer came, and how long the texts were.

Definitions as vLLM's ``vllm bench serve`` (vllm/benchmarks/serve.py, lib/endpoint_request_func.py):

* TTFT, time to first token: from the start of the request to the first chunk that has a choice.
* ITL, inter-token latency: between two such chunks; one value each, over all requests. A server that sends several
  tokens in a chunk has fewer and larger ones.
* E2E, end to end: from the start to the last such chunk.
* TPOT, time per output token: (E2E - TTFT) / (output tokens - 1), for answers of two tokens and more.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Record:
    """One request, answered or failed.

    Attributes:
        start_s: when it was sent, on a monotonic clock.
        end_s: when nothing more came.
        chunks_s: when each chunk with a choice came, on the same clock.
        prompt_tokens, output_tokens: as the server counted them.
        error: why it failed; None: it was answered to its end.
    """

    start_s: float
    end_s: float
    chunks_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.chunks_s[0] - self.start_s

    @property
    def e2e_s(self) -> float:
        return self.chunks_s[-1] - self.start_s

    @property
    def itl_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.chunks_s)]

    @property
    def tpot_s(self) -> float | None:
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None
