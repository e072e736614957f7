"""Tests of spes_p2p.net against the real daemon, several nodes in one process."""
