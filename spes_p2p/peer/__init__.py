"""The peer process: the event-loop shell around the pure core, composing network, store and apply."""
