"""Seeded simulation of agreement and ownership: thousands of swarms through loss, crashes, lies (SPEC 4, 5, 7).

    Options (seed) -> World: clock, Network, Disks, peers around the real `core` -> Checkers after every step

`options` says what goes wrong, `faults` and `network` let it happen, `disk` and `clock` are a peer's machine, `records`
stands in for keys and envelopes, `peers` and `catching_up` for the shell of a peer; `faulty` are machines that break
rules without meaning to, `liars` those that mean to, `organizer` is the organizer. `scenarios` draws swarms from
seeds, `soak` runs them by the thousand, `shrink` reduces one that fails, `planted` holds bugs that must be caught,
`scale` counts messages and bytes from 4 to 200 peers.
"""
