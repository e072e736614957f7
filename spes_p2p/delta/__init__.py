"""Deltas: their codecs, and the exact arithmetic that turns a round's contributions into the next global state."""
