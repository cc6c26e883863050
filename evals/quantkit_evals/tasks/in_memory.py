"""Our tasks as lm-eval wants them: a ``ConfigurableTask`` with documents in memory, nothing fetched or cached.

Importing this module imports lm-eval. Requests and scores of continuations are lm-eval's own; ``answers``
scores what was generated. A schema goes with the request as the generation argument ``json_schema``, which a
candidate enforces if it can.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.task import ConfigurableTask

from ..run import Metric
from . import answers
from .schema import TaskFile

Item = Mapping[str, Any]
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

    Args:
        definition: the task's file; name, version and metrics are as it or its reader has them.
        items: of it, with ``id`` and ``cluster``.
    """

    def __init__(
        self, name: str, version: str, definition: TaskFile, metrics: tuple[Metric, ...], items: Sequence[Item]
    ) -> None:
        self.metrics, self._items = metrics, items
        super().__init__(config=_config(definition, metrics) | {"task": name, "metadata": {"version": version}})

    def download(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to download."""
        self.dataset = {"test": Docs(dict(item) for item in self._items)}

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


def _config(task: TaskFile, metrics: tuple[Metric, ...]) -> dict[str, Any]:
    delimiter = task.delimiter
    config: dict[str, Any] = {
        "output_type": OUTPUT[task.kind],
        "test_split": "test",
        "num_fewshot": 0,
        "target_delimiter": delimiter,
        "metric_list": [
            {
                "metric": metric.name,
                "aggregation": AGGREGATION.get(metric.name, "mean"),
                "higher_is_better": metric.is_higher_better,
            }
            for metric in metrics
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
    wanted = [metric.name for metric in metrics]
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
