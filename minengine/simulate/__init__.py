"""The engine's own scheduler under a virtual clock: pure Python, so that a page's Python runs these same files."""
