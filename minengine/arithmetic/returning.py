"""A history that has left the device: what it takes to bring it back from a tier below, against computing it again."""
from __future__ import annotations

import math

__all__ = ["break_even_bytes_per_s", "break_even_tokens", "recompute_time_s", "return_time_s"]


def recompute_time_s(tokens: float, tok_s: float) -> float:
    """Seconds to compute a history again at `tok_s` tokens of prefill a second."""
    return tokens / tok_s


def return_time_s(tokens: float, token_bytes: float, bytes_per_s: float, *,
                  block_size: int = 1, block_s: float = 0.0, start_s: float = 0.0) -> float:
    """Seconds to bring a history back in blocks of `block_size` tokens: its bytes, `block_s`
    for each block on top (a name to find, a file to open), and `start_s` once."""
    return start_s + tokens * token_bytes / bytes_per_s + tokens / block_size * block_s


def break_even_tokens(tok_s: float, token_bytes: float, bytes_per_s: float, *,
                      block_size: int = 1, block_s: float = 0.0, start_s: float = 0.0) -> float:
    """From how many tokens on it is quicker to bring a history back than to compute it
    again; infinite where it never is."""
    back_s = return_time_s(1, token_bytes, bytes_per_s, block_size=block_size, block_s=block_s)
    saved_s = recompute_time_s(1, tok_s) - back_s
    return start_s / saved_s if saved_s > 0 else math.inf


def break_even_bytes_per_s(token_bytes: float, tok_s: float) -> float:
    """The bandwidth at which bringing a history back takes as long as computing it again, if nothing but bytes costs anything."""
    return token_bytes * tok_s
