"""Attachments: what comes with an artifact and is not its core. ``ledger`` keeps the list, the others render."""

from .ledger import add_attachment, add_attachments, read_attachments, write_first_attachments

__all__ = ["add_attachment", "add_attachments", "read_attachments", "write_first_attachments"]
