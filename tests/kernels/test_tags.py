"""The page tag check against plain loops, on the twin and every instruction-set level."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit_kernels import tags
from quantkit_kernels.library import Library
from quantkit_kernels.tags import check_page_tags, prepared_check

from .backends import native_levels


@pytest.fixture(params=["twin", *native_levels()], autouse=True)
def each_level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    library = None if request.param == "twin" else Library.load(request.param)
    if library:
        library.declare({"qk_check_page_tags": tags._SIGNATURE})
    monkeypatch.setattr(tags, "_native", lambda: library)
    yield


def plainly(table: Any, pages: Any, expected: Any, pool: Any, counts: Any) -> list[bool]:
    def good(r: int, i: int) -> bool:
        page = int(table[r, i])
        return page == pages[r, i] and 0 <= page < len(pool) and pool[page] == expected[r, i]

    return [0 <= n <= table.shape[1] and all(good(r, i) for i in range(n)) for r, n in enumerate(counts.tolist())]


def case(requests: int, entries: int, num_pages: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    pool = rng.integers(0, 2**64, num_pages, dtype=np.uint64)
    table = rng.integers(0, max(num_pages, 1), (requests, entries), dtype=np.int32)
    tag = pool[table] if num_pages else np.zeros((requests, entries), np.uint64)
    return [table, table.copy(), tag, pool, rng.integers(0, entries + 1, requests, dtype=np.int32)]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_is_seen_where_it_counts(data: st.DataObject) -> None:
    requests, entries = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    given_case = case(requests, entries, data.draw(st.integers(1, 50)), data.draw(st.integers(0, 99)))
    assert check_page_tags(*given_case).all()
    for _ in range(data.draw(st.integers(0, 3))):
        which, r, i = (
            data.draw(st.integers(0, 4)),
            data.draw(st.integers(0, requests - 1)),
            data.draw(st.integers(0, entries - 1)),
        )
        value = data.draw(st.sampled_from([-1, 0, 1, 49, 50, 2**31 - 1, -(2**31)]))
        if which < 2:
            given_case[which][r, i] = value
        elif which == 2:
            given_case[2][r, i] ^= np.uint64(1) << np.uint64(data.draw(st.integers(0, 63)))
        elif which == 3:
            given_case[3][i % len(given_case[3])] += np.uint64(1)
        else:
            given_case[4][r] = data.draw(st.sampled_from([-1, entries, entries + 1, 2**31 - 1, -(2**31)]))
    assert check_page_tags(*given_case).tolist() == plainly(*given_case)
    assert [*map(bool, prepared_check(*given_case)())] == plainly(*given_case)


@pytest.mark.parametrize("page", [-1, 10, 2**31 - 1, -(2**31)])
def test_pages_outside_the_pool(page: int) -> None:
    table, pages, expected, pool, counts = case(3, 17, 10)
    counts[:] = 17
    table[1, 16] = pages[1, 16] = page
    assert check_page_tags(table, pages, expected, pool, counts).tolist() == [True, False, True]


@pytest.mark.parametrize(("requests", "entries", "num_pages"), [(0, 0, 0), (0, 5, 3), (3, 0, 4), (2, 4, 0)])
def test_nothing(requests: int, entries: int, num_pages: int) -> None:
    given_case = case(requests, entries, num_pages)
    given_case[4][:] = 0
    assert check_page_tags(*given_case).tolist() == [True] * requests
    if entries and requests:
        given_case[4][0] = 1
        assert check_page_tags(*given_case)[0] == (num_pages > 0)


def test_rows_with_other_things_between_them() -> None:
    table, pages, expected, pool, counts = case(4, 33, 100)
    wide = np.full((9, 70), -5, np.int32)
    inner = wide[1::2, 3:36][:4]
    inner[:] = table
    apart = np.zeros((4, 40), np.uint64)[::-1, 5:38]
    apart[:] = expected
    assert check_page_tags(inner, pages, apart, pool, counts).all()
    counts[2] = 33
    apart[2, 32] += np.uint64(1)
    assert check_page_tags(inner, pages, apart, pool, counts).tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    ("index", "name"),
    [(0, "block_table"), (1, "expected_pages"), (2, "expected_tags"), (3, "pool_tags"), (4, "counts")],
)
def test_wrong_arguments_name_themselves(index: int, name: str) -> None:
    given_case = case(4, 8, 16)
    right = given_case[index]
    unaligned = np.frombuffer(b"\0" * (right.nbytes + 1), np.uint8)[1:].view(right.dtype).reshape(right.shape)
    wrong: list[Any] = [
        right.astype(np.int64), right.astype(right.dtype.newbyteorder()), right.tolist(), right[None],
        unaligned, np.repeat(right, 2, axis=-1)[..., ::2],
    ]  # fmt: skip
    if index != 3:
        wrong.append(right[:-1])
    if index in (1, 2):
        wrong.append(right[:, :-1])
    for value in wrong:
        given_case[index] = value
        with pytest.raises((TypeError, ValueError), match="expected_pages|" + name if index == 0 else name):
            check_page_tags(*given_case)
