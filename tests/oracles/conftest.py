"""Artifacts of the bundled models, converted once per run and combination."""

from __future__ import annotations

import functools

import pytest

import quantkit


@pytest.fixture(scope="session")
def artifact(tmp_path_factory):
    """``artifact(model, rest="fp8", group_size=32, method="mse", linears=...)`` -> a finished Artifact."""

    @functools.cache
    def make(model: str, **options: object) -> quantkit.Artifact:
        out = tmp_path_factory.mktemp("artifacts") / model
        with quantkit.open(model) as checkpoint:
            return quantkit.convert(quantkit.plan(checkpoint, **options), out, checkpoint=checkpoint, jobs=1)

    return make
