"""Tests of spes_p2p: unit, golden vectors, seeded simulation, and real processes over loopback."""
