"""Prefill and decode apart: worker processes, what moves between them, and who gets which request."""
