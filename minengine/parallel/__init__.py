"""Several ranks as one engine: which part of a model, a cache and a step each of them has."""
