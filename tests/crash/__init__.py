"""Crash tests: a peer whose disk fails, or that stops, at the n-th effect, for every n."""
