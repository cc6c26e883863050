"""Looking at checkpoints, views and artifacts without changing them: what they are, what is in a tensor, what
differs between two.

Works on the ``Checkpoint`` seam, so the same code looks at a publisher's files, a Hub repository and our own
views, and reads weights in row tiles: memory stays at some tens of MiB however large a tensor is. Sits beside
``quantkit.convert``: may use plan, artifact and below; nothing below uses it.
"""
