"""Prefix index: full pages of prompts, found again by the tokens that they and all pages before them hold.

An entry's key is a digest of its parent's key and its own tokens; the first parent is a digest of the request's
salt, so that requests of different salts never meet. A digest only finds an entry: what is returned has been
compared, tokens, parent and salt, so a collision is a miss and never somebody else's content (vLLM #14491).
Entries hold (page, tag): one whose page was freed behind the index's back is dropped when it is hit.

A page has one entry. An entry goes before its parent (leaf first), the pages least recently given back first.

Left out: partial pages, and pages with generated tokens, which decode weights have made: only ``insert`` what
prefill has made.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from .page import IntegrityError, PageRef
from .pool import PagePool

Digest = Callable[[bytes, bytes], bytes]
DIGEST_BYTES = 32


def chained_blake2b(parent: bytes, content: bytes) -> bytes:
    """BLAKE2b (RFC 7693) of ``content``, keyed by the parent's digest; keyed by nothing for a salt."""
    return blake2b(content, digest_size=DIGEST_BYTES, key=parent).digest()


@dataclass(eq=False, slots=True)
class _Node:
    ref: PageRef
    digest: bytes
    parent: _Node | None
    salt: str
    tokens: bytes  # int32 each
    children: set[_Node] = field(default_factory=set)


class PrefixIndex:
    """Of the pages of ``pool``, to which it attaches itself.

    Args:
        pool: whose pages they are.
        page_size: tokens in a page.
        lookahead: tokens behind a page that what it holds depends on, too. They are compared with the page's own,
            so pages without as many behind them are not full.
        digest: of (parent's digest, content); another one for tests.

    Attributes:
        num_stale: entries dropped because their page was no longer theirs.
        num_collisions: entries found under a digest that were of other tokens, another parent or another salt.
        num_evictions: entries given up for new pages.
    """

    def __init__(
        self, pool: PagePool, page_size: int, *, lookahead: int = 0, digest: Digest = chained_blake2b
    ) -> None:
        self._pool = pool
        self._page_size, self.lookahead = page_size, lookahead
        self._digest = digest
        self._nodes: dict[bytes, _Node] = {}
        self._of_page: dict[int, _Node] = {}
        self.num_stale = self.num_collisions = self.num_evictions = 0
        pool.attach(self)

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, tokens: Sequence[int], salt: str = "") -> list[PageRef]:
        """Pages of the longest known beginning of ``tokens``, whole pages only.

        Share them before anything else is allocated: nothing protects them until then. A caller that needs a token
        left to compute asks without its last one.
        """
        found: list[PageRef] = []
        parent: _Node | None = None
        for digest, chunk in self._keys(tokens, salt):
            node = self._nodes.get(digest)
            if node is None or not self._is_same(node, parent, salt, chunk) or not self._is_fresh(node):
                break
            found.append(node.ref)
            parent = node
        return found

    def insert(self, tokens: Sequence[int], salt: str, refs: Sequence[PageRef]) -> list[PageRef]:
        """Enter the full pages of ``tokens``, which ``refs`` hold; the caller holds them too.

        Returns:
            For each full page the one that the index has: the first that was entered with these tokens, else the
            caller's. A page behind a collision stays out.

        Raises:
            ValueError: a page is there twice.
        """
        if len({ref.page for ref in refs}) != len(refs):
            raise ValueError(f"a page is there twice: {[ref.page for ref in refs]}")
        canonical: list[PageRef] = []
        parent: _Node | None = None
        for (digest, chunk), ref in zip(self._keys(tokens, salt), refs, strict=False):
            node = self._nodes.get(digest)
            if node is not None and not self._is_same(node, parent, salt, chunk):
                break
            if node is None or not self._is_fresh(node):
                node = self._enter(_Node(ref, digest, parent, salt, chunk))
            if node is None:
                break
            canonical.append(node.ref)
            parent = node
        num_full = min(max(len(tokens) - self.lookahead, 0) // self._page_size, len(refs))
        return canonical + list(refs[len(canonical) : num_full])

    def holds(self, page: int) -> bool:
        """Whether there is an entry for the page as it is now."""
        node = self._of_page.get(page)
        return node is not None and self._pool.matches(node.ref)

    def evict(self, page: int) -> None:
        """Drop the page's entry, or a cached one below it."""
        node = self._of_page[page]
        while (child := next((c for c in node.children if self._pool.is_cached(c.ref.page)), None)) is not None:
            node = child
        self._remove(node)  # with entries below it whose pages are used: only a hit on this one could find them
        self.num_evictions += 1

    def check_integrity(self) -> None:
        """Raises IntegrityError: an entry without its parent, or without a page of its own."""
        for digest, node in self._nodes.items():
            page = node.ref.page
            if node.digest != digest or (node.parent and self._nodes.get(node.parent.digest) is not node.parent):
                raise IntegrityError(f"page {page}: its entry can't be reached")
            if node.parent and node not in node.parent.children:
                raise IntegrityError(f"page {page}: its entry is unknown to its parent")
            if self._of_page.get(page) is not node:
                raise IntegrityError(f"page {page} has two entries")
            if not self._pool.is_live(node.ref):
                raise IntegrityError(f"page {page}: its entry is stale")
        if len(self._of_page) != len(self._nodes):
            raise IntegrityError(f"{len(self._nodes)} entries for {len(self._of_page)} pages")

    def _keys(self, tokens: Sequence[int], salt: str) -> Iterator[tuple[bytes, bytes]]:
        """(digest, content) of each full page."""
        packed, size = array("i", tokens).tobytes(), array("i").itemsize
        step, width = self._page_size * size, (self._page_size + self.lookahead) * size
        digest = self._digest(b"", salt.encode())
        for start in range(0, len(packed) - width + 1, step):
            chunk = packed[start : start + width]
            digest = self._digest(digest, chunk)
            yield digest, chunk

    def _is_same(self, node: _Node, parent: _Node | None, salt: str, chunk: bytes) -> bool:
        """Whether a node that was found is the one that was looked for."""
        if node.parent is parent and node.salt == salt and node.tokens == chunk:
            return True
        self.num_collisions += 1
        return False

    def _is_fresh(self, node: _Node) -> bool:
        """Whether the node's page is still its own; it is dropped if not."""
        if self._pool.is_live(node.ref):
            return True
        self.num_stale += 1
        self._pool.record("prefix", [node.ref])
        self._remove(node)
        return False

    def _enter(self, node: _Node) -> _Node | None:
        """None if its page is not the caller's any more, or if its parent has gone."""
        if not self._pool.is_live(node.ref):
            self._pool.record("prefix", [node.ref])
            return None
        former = self._of_page.get(node.ref.page)
        if former is not None:  # of what the page held before it was freed behind the index's back
            self._remove(former)
        if node.parent is not None:
            if self._nodes.get(node.parent.digest) is not node.parent:
                return None
            node.parent.children.add(node)
        self._nodes[node.digest] = self._of_page[node.ref.page] = node
        return node

    def _remove(self, node: _Node) -> None:
        """Drop the node and all below it."""
        if node.parent is not None:
            node.parent.children.discard(node)
        pending = [node]
        while pending:
            node = pending.pop()
            pending.extend(node.children)
            del self._nodes[node.digest]
            if self._of_page.get(node.ref.page) is node:
                del self._of_page[node.ref.page]
                self._pool.forget(node.ref)
