"""From a directory to a running server, or to one answer: what commands call."""
