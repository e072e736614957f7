"""Peers behind home routers of every kind: which of them reach one another, and how."""
