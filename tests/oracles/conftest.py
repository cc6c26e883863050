"""Artifacts of the bundled models, converted once per run and combination."""

from __future__ import annotations

import functools

import pytest

import quantkit


@pytest.fixture(scope="session")
def artifact(tmp_path_factory):
    """``artifact(model, rest="fp8", group_size=32, method="mse", linears=...)`` -> a finished Artifact.

    Data-free unless a method is given: what is checked here is the format.
    """

    @functools.cache
    def make(model: str, **options: object) -> quantkit.Artifact:
        out = tmp_path_factory.mktemp("artifacts") / model
        with quantkit.open(model) as checkpoint:
            plan = quantkit.plan(checkpoint, **{"method": "mse", **options})
            return quantkit.convert(plan, out, checkpoint=checkpoint, jobs=1)

    return make
