"""Traces replayed in a closed loop against what serves: an engine in this process, a cluster, or any OpenAI-compatible server."""
