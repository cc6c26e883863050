"""Page tags."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .case import Case, Outcome, modules, same

tags, twin_tags = modules("tags")


def check_tags(case: Case) -> Iterator[tuple[str, Outcome]]:
    table = torch.randint(0, 500, (64, 256), generator=case.generator, dtype=torch.int32)
    pool = torch.randint(-(2**63), 2**63 - 1, (500,), generator=case.generator)
    wanted, counts = pool[table.long()], torch.randint(0, 257, (64,), generator=case.generator, dtype=torch.int32)
    pages = table.clone()
    pages[::3, 9] ^= 1
    wanted[1::3, 4] ^= 1
    table[2::9, 0], counts[5] = 500, -1
    parts = (table, pages, wanted.view(torch.uint64), pool.view(torch.uint64), counts)
    found = tags.check_page_tags(*case.to(*parts))
    yield "check_page_tags", same(found, twin_tags.check_page_tags(*parts))
