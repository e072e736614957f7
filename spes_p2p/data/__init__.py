"""The run's data: from URLs in the manifest to sequences of tokens for the trainer."""
