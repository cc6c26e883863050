"""Tasks with documents of the tests' own, and what the tests score with."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from quantkit_evals.run import Metric

ACCURACY = Metric("acc", "accuracy", True, "%")
PERPLEXITY = Metric("word_perplexity", "perplexity", False)


@dataclass(frozen=True)
class Source:
    """A task of lm-eval from a dict."""

    name: str
    docs: tuple[dict[str, Any], ...]
    settings: tuple[tuple[str, Any], ...]
    metrics: tuple[Metric, ...]

    @property
    def version(self) -> str:
        return hashlib.sha256(json.dumps([self.name, self.docs]).encode()).hexdigest()

    def lm_eval_task(self) -> Any:
        from datasets import Dataset
        from lm_eval.api.task import ConfigurableTask

        docs = {"test": Dataset.from_list(list(self.docs))}
        task = ConfigurableTask(
            config={
                "task": self.name, "custom_dataset": lambda **_: docs, "test_split": "test",
                "num_fewshot": 0, **dict(self.settings),
            }
        )  # fmt: skip
        task.metrics = self.metrics
        task.item_id = lambda doc: doc["id"]
        task.cluster_of = lambda doc: doc.get("cluster", doc["id"])
        return task


def choice(*docs: dict[str, Any], name: str = "choice") -> Source:
    """Documents of text, choices, answer."""
    settings = {
        "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "choices",
        "doc_to_target": "answer", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    return Source(name, docs, tuple(settings.items()), (ACCURACY,))


def cloze(*docs: dict[str, Any], name: str = "cloze") -> Source:
    """Documents of text, target."""
    settings = {
        "output_type": "loglikelihood", "doc_to_text": "{{text}}", "doc_to_target": "{{target}}",
        "target_delimiter": "", "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    }  # fmt: skip
    return Source(name, docs, tuple(settings.items()), (ACCURACY, Metric("perplexity", "perplexity", False)))


def rolling(*docs: dict[str, Any], name: str = "rolling") -> Source:
    """Documents of text."""
    settings = {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    }  # fmt: skip
    return Source(name, docs, tuple(settings.items()), (PERPLEXITY,))


def answering(*docs: dict[str, Any], name: str = "answering", **generation: Any) -> Source:
    """Documents of text, target; the answer must be the target."""
    settings = {
        "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, **generation},
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    return Source(name, docs, tuple(settings.items()), (Metric("exact_match", "accuracy", True, "%"),))
