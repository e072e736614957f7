"""A run's log, offline: verified, shown, exported, and applied again with a change."""
