"""`spes-bootstrap`: a door into the swarm, a relay and an address mirror; no training passes through it."""
