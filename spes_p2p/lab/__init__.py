"""The laboratory: SPES and what it is compared with, in one process, on the same model, data, tokens and seeds."""
