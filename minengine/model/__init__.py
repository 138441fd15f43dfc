"""Decoders: what a step's tokens go through, and where their weights come from."""
