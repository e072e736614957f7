"""Keys and envelopes: who said it, and that it was said."""
