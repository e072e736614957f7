"""SPES: peer-to-peer pretraining of Mixture-of-Experts language models by sparse expert synchronisation."""

__version__ = "0.1.0"
