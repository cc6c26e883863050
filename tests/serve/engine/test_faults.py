"""Every injected fault is met by the guard named for it; its damage shows with tags off."""

from __future__ import annotations

import logging

import pytest

from quantkit_serve.engine.injection import Injection
from quantkit_serve.paging import FAULTS
from quantkit_serve.request import FinishReason
from tests.serve.engine.fake import Answers, alone, config, drain, engine, request


def serve(fault: str, *, tags: bool):  # type: ignore[no-untyped-def]
    """A seed request that leaves cached pages, then several that share its prompt, in steps with arrivals."""
    core, runner = engine(config(pages=40, tags=tags))
    core.add(request("seed", range(1, 14), 4, ignore_eos=True))
    answers = Answers()
    while core.has_work:
        answers.add(core.step())
    core._injection = Injection(FAULTS[fault](), runner.scribble)
    requests = [request(f"r{i}", [*range(1, 13), 30 + i, 31], 16, ignore_eos=True) for i in range(3)]
    late = [request(f"l{i}", [40 + i, 5, 6], 12, ignore_eos=True) for i in range(4)]
    if fault == "stale-prefix":  # struck while the pages are cached, then one of them is somebody else's
        for name in ("between", "taker"):
            core.add(request(name, [50], 8, ignore_eos=True))
            answers.add(core.step())
    for one in requests:
        core.add(one)
    for one in late:
        answers.add(core.step())
        core.add(one)
    for step in range(400):
        if not core.has_work:
            break
        answers.add(core.step())
        if step == 6 and fault == "late-write" and (ended := core.abort("r0")) is not None:
            answers.add([ended])
    assert core._injection.has_struck, "nothing was struck"
    assert not core.has_work
    return core, answers, [*requests, *late]


@pytest.mark.parametrize("fault", ["free-early", "double-allocate", "remap"])
def test_the_check_before_a_step_ends_one_request(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        core, answers, requests = serve(fault, tags=True)
    failed = [one for one in requests if answers.last[one.request_id].finish is FinishReason.ERROR]
    assert len(failed) == 1
    assert "KV page check failed" in (answers.last[failed[0].request_id].error or "")
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert failed[0].request_id in line and "page" in line and "tag" in line
    assert core.figures().kv_tag_mismatches >= 1
    assert "step" in {where for where, _, _, _ in core.figures().findings}
    for one in requests:
        whole = alone(one)
        if one in failed:
            assert answers.tokens[one.request_id] == whole[: len(answers.tokens[one.request_id])]
        else:
            assert answers.tokens[one.request_id] == whole


def test_a_stale_entry_of_the_prefix_index_is_a_miss() -> None:
    core, answers, requests = serve("stale-prefix", tags=True)
    assert core.figures().kv_tag_mismatches == 1
    for one in requests:
        assert answers.tokens[one.request_id] == alone(one)


def test_a_late_write_meets_a_page_that_nobody_has() -> None:
    _, answers, requests = serve("late-write", tags=True)
    for one in requests[1:]:
        assert answers.tokens[one.request_id] == alone(one)


@pytest.mark.parametrize("fault", ["free-early", "double-allocate", "remap", "stale-prefix"])
def test_without_tags_answers_cross(fault: str) -> None:
    _, answers, requests = serve(fault, tags=False)
    assert any(answers.tokens[one.request_id] != alone(one) for one in requests)


def test_a_fault_that_never_strikes_is_told(caplog: pytest.LogCaptureFixture) -> None:
    core, _ = engine(fault=FAULTS["remap"]())  # needs two requests
    core.add(request("alone", [5], 3))
    drain(core)
    assert not caplog.text
    core.close()
    core.close()
    assert caplog.text.count("injected fault: Remap has never struck") == 1
    core, _, _ = serve("remap", tags=True)
    caplog.clear()
    core.close()
    assert not caplog.text
