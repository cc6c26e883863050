"""Who owns which KV page: the pool, page tags, the prefix index and the block tables that attention reads.

numpy and the standard library only: scheduling calls this between steps, where a step of torch would cost more
than all of it. The bytes of the pages are the runner's; here a page is a number.

A step, in the order in which the engine calls::

    refs = index.match(prompt[:-1], salt); pool.share(refs, owner)      # nothing in between
    refs = pool.allocate(count, owner)                                  # OutOfPages: preempt somebody
    sequence.table.extend(ref.page for ref in refs); sequence.expected.extend(refs)
    table = tables.fill([s.table ...], [s.expected ...])                # tables = block_tables(pool, ...)
    for mismatch in tables.check(): ...                                 # end that request, fill again without it
    ticket = pool.launch(pages of the step); runner.run(...); pool.landed(ticket)
    index.insert(prompt, salt, sequence.expected)                       # full pages made by prefill
    pool.release(sequence.expected, owner)

One thread calls; nothing here locks.
"""

from .audit import Audit, Finding
from .canary import Canary, Seal
from .entries import Entries
from .faults import FAULTS, Fault, Scene, Victim
from .page import IntegrityError, OutOfPages, PageRef, StalePage
from .pool import PagePool, PoolCounts
from .prefix import PrefixIndex
from .tags import BlockTables, Mismatch, TagCheck, block_tables

__all__ = [
    "FAULTS",
    "Audit",
    "BlockTables",
    "Canary",
    "Entries",
    "Fault",
    "Finding",
    "IntegrityError",
    "Mismatch",
    "OutOfPages",
    "PagePool",
    "PageRef",
    "PoolCounts",
    "PrefixIndex",
    "Scene",
    "Seal",
    "StalePage",
    "TagCheck",
    "Victim",
    "block_tables",
]
