"""The trainer process: the training loop, what it remembers on disk, its link to the peer (SPEC 12.2)."""
