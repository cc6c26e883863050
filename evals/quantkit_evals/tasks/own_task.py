"""Our tasks as lm-eval wants them: a ``ConfigurableTask`` with documents in memory, nothing fetched or cached.

Importing this module imports lm-eval. Requests and scores of continuations are lm-eval's own; ``answers``
scores what was generated. A schema goes with the request as the generation argument ``json_schema``, which a
candidate enforces if it can.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lm_eval.api.task import ConfigurableTask

from . import answers
from .source import OwnTask

MAX_TOKENS = 256
OUTPUT = {
    "choice": "multiple_choice",
    "cloze": "loglikelihood",
    "perplexity": "loglikelihood_rolling",
    "generate": "generate_until",
}
AGGREGATION = {
    "perplexity": "perplexity",
    "word_perplexity": "weighted_perplexity",
    "byte_perplexity": "weighted_perplexity",
}


class Docs(list[dict[str, Any]]):
    """Items as lm-eval takes them from ``datasets``: a sequence that knows its columns."""

    @property
    def features(self) -> dict[str, None]:
        return dict.fromkeys(key for doc in self for key in doc)


class InMemoryTask(ConfigurableTask):  # type: ignore[misc]  # lm-eval is untyped to us
    """See the module.

    Attributes:
        metrics: as the contract has them.
    """

    def __init__(self, source: OwnTask) -> None:
        self._source = source
        self.metrics = source.metrics
        super().__init__(config=_config(source))

    def download(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to download."""
        self.dataset = {"test": Docs(dict(item) for item in self._source.items)}

    def item_id(self, doc: Mapping[str, Any]) -> str:
        return str(doc["id"])

    def cluster_of(self, doc: Mapping[str, Any]) -> str:
        return str(doc["cluster"])

    def construct_requests(self, doc: dict[str, Any], ctx: Any, **kwargs: Any) -> Any:
        request = super().construct_requests(doc, ctx, **kwargs)
        if "json_schema" in doc:
            prompt, arguments = request.arguments
            # as text: the order of properties is the order in which they are generated
            schema = json.dumps(doc["json_schema"], ensure_ascii=False)
            request.arguments = (prompt, {**arguments, "json_schema": schema})
        return request


def make_task(source: OwnTask) -> InMemoryTask:
    return InMemoryTask(source)


def _config(source: OwnTask) -> dict[str, Any]:
    task = source.definition
    delimiter = task.delimiter
    config: dict[str, Any] = {
        "task": source.name,
        "output_type": OUTPUT[task.kind],
        "test_split": "test",
        "num_fewshot": 0,
        "target_delimiter": delimiter,
        "metadata": {"version": source.version},
        "metric_list": [
            {
                "metric": metric.name,
                "aggregation": AGGREGATION.get(metric.name, "mean"),
                "higher_is_better": metric.is_higher_better,
            }
            for metric in source.metrics
        ],
    }
    if task.kind == "choice":
        return config | {
            "doc_to_text": lambda doc: doc["context"],
            "doc_to_choice": lambda doc: doc["choices"],
            "doc_to_target": lambda doc: doc["answer"],
        }
    if task.kind == "cloze":
        # unlike for choices, lm-eval puts no delimiter before a target
        return config | {
            "doc_to_text": lambda doc: doc["context"],
            "doc_to_target": lambda doc: delimiter + doc["target"],
        }
    if task.kind == "perplexity":
        return config | {"doc_to_text": lambda doc: "", "doc_to_target": lambda doc: doc["text"]}
    wanted = [metric.name for metric in source.metrics]
    return config | {
        "doc_to_text": lambda doc: doc["prompt"],
        "doc_to_target": lambda doc: str(doc.get("target", "")),
        "process_results": lambda doc, results: {
            name: value for name, value in answers.score(doc, results[0]).items() if name in wanted
        },
        "generation_kwargs": {
            "until": ["\n"] if task.until is None else list(task.until),  # an empty list is none, as it says
            "max_gen_toks": task.max_tokens or MAX_TOKENS,
            "do_sample": False,
        },
    }
