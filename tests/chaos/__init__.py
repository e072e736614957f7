"""Real programs under random faults, and the account of what became of the run: `python -m tests.chaos`.

cage --namespaces--> a line and a small disk for each machine
run --opens--> swarm (bootstraps, volunteers) <--hits-- faults, a timetable from one seed
swarm --lines, disks--> account (commits, stalls, problems) <--what is left at the end-- checks
"""
