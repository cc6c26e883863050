"""One file per command; each parses, makes one library call and prints."""
