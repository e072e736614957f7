"""Seeded simulation of agreement and ownership: hundreds of small swarms through loss, crashes and lies (SPEC 4, 5, 7).

    options (seed) -> World: network, clock, disks, peers around the real `core` -> Checkers after every step

`records` stands in for keys and envelopes, `world` for network and clock, `peers` for the shell of a peer, `liars` for
those who break the rules; `scenarios` draws swarms from seeds, `soak` runs them by the thousand.
"""
