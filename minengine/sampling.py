"""From logits to tokens: greedy, temperature, min-p, top-k, top-p, seeded per request, with log-probabilities.

A sampled token is found by inverting the cumulative distribution at one uniform number from the request's own
generator. So a seeded request draws the same numbers alone or in any batch.
"""
from __future__ import annotations

from random import Random
from typing import Sequence

import torch
from torch import Tensor

from .request import Logprob, Request

__all__ = ["distribution", "sample"]


def sample(logits: Tensor, requests: Sequence[Request]) -> list[int | None]:
    """One token for each row of `logits` (S, V); fills in `request.logprobs` where they were asked for.

    A request with a grammar gets a token that the grammar allows, and its matcher goes on by it; None if there is no such token.
    """
    if all(r.grammar is None for r in requests):
        tokens: list[int | None] = _choose(logits, requests)
    else:
        tokens = _choose_allowed(logits, requests)
    wanted = [i for i, r in enumerate(requests) if r.logprobs is not None and tokens[i] is not None]
    if wanted:
        _record_logprobs(logits, tokens, requests, wanted)
    return tokens


def _choose(logits: Tensor, requests: Sequence[Request], rngs: Sequence[Random] | None = None) -> list[int]:
    """One token a request, drawn from its own generator or from the one in `rngs`."""
    best = logits.argmax(-1)  # (S,)
    drawn = [i for i, r in enumerate(requests) if r.params.temperature > 0]
    if drawn:
        params = [requests[i].params for i in drawn]
        probs, token_ids = distribution(
            logits[drawn] if len(drawn) < len(requests) else logits,
            temperature=[p.temperature for p in params], min_p=[p.min_p for p in params],
            top_k=[p.top_k for p in params], top_p=[p.top_p for p in params],
        )
        cdf = probs.double().cumsum(-1)  # (s, V)
        u = torch.tensor([[(rngs[i] if rngs else requests[i].rng).random()] for i in drawn], dtype=torch.float64, device=logits.device) * cdf[:, -1:]
        # right=True: u = 0 falls on the first token that has any probability
        at = torch.searchsorted(cdf, u, right=True).clamp_(max=cdf.shape[-1] - 1)
        best[drawn] = token_ids.gather(-1, at).squeeze(-1)
    return best.tolist()


def _choose_allowed(logits: Tensor,
                    requests: Sequence[Request]) -> list[int | None]:
    """As `_choose`, among the tokens that the grammars allow and then accept."""
    from .grammar import mask_logits

    masked, stuck = mask_logits(logits, [r.grammar for r in requests])  # (S, V)
    tokens: list[int | None] = _choose(masked, requests)
    for i, request in enumerate(requests):
        if i in stuck:
            tokens[i] = None
        elif request.grammar is not None:
            # A mask may be a shade too wide: in a long repeat of a wide range of
            # characters, xgrammar 0.2.8 lets a token through whose later characters
            # lie outside. Accepting judges every character, so what it refuses is
            # taken out, and the next one chosen.
            # Those draws are from a generator that branches off here: a token takes one
            # draw of the request's own, so that another engine can go on from it.
            rng = None
            while tokens[i] is not None and not request.grammar.accept(tokens[i]):
                rng = rng or _branch(request.rng)
                masked[i, tokens[i]] = -torch.inf
                left = masked[i: i + 1]  # (1, V)
                some = (left.max() > -torch.inf
                        and not request.grammar.overdrawn)
                tokens[i] = _choose(left, [request], [rng])[0] if some else None
    return tokens


def _branch(rng: Random) -> Random:
    """A generator whose numbers follow from that one's state, which stays as it is."""
    twin = Random()
    twin.setstate(rng.getstate())
    return Random(twin.getrandbits(64))


def distribution(logits: Tensor, *, temperature: Sequence[float], min_p: Sequence[float], top_k: Sequence[int],
                 top_p: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The modified distribution of each row, most likely token first.

    Args:
        logits: (S, V); the other arguments hold one value a row.

    Returns:
        probabilities (S, V) float32, zero where a filter took the token out, not renormalised; token ids (S, V).
    """
    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device).unsqueeze(-1)  # (S, 1)

    vocab = logits.shape[-1]
    ordered, token_ids = logits.float().sort(dim=-1, descending=True, stable=True)
    probs = ((ordered - ordered[:, :1]) / column(temperature)).softmax(-1)
    keep = probs >= column(min_p) * probs[:, :1]  # never takes the best token out, and nor do the others
    if any(k > 0 for k in top_k):
        keep &= torch.arange(vocab, device=logits.device) < column([k if k > 0 else vocab for k in top_k])
    if any(p < 1.0 for p in top_p):
        kept = probs * keep
        mass = kept.cumsum(-1)
        # A token stays while the mass before it is below top_p. The first one always does, also where top_p rounds to 0.
        keep[:, 1:] &= ((mass - kept) < column(top_p) * mass[:, -1:])[:, 1:]
    return probs * keep, token_ids


def _record_logprobs(logits: Tensor, tokens: list[int | None], requests: Sequence[Request], wanted: list[int]) -> None:
    """Append {token: Logprob} of the unmodified distribution: the k best, and the chosen one with its true rank."""
    logprobs = logits[wanted].float().log_softmax(-1)  # (s, V)
    chosen = logprobs.gather(-1, torch.tensor([[tokens[i]] for i in wanted], device=logits.device))  # (s, 1)
    ranks = ((logprobs > chosen).sum(-1) + 1).tolist()
    most = max(requests[i].params.logprobs for i in wanted)
    values, ids = (t.tolist() for t in logprobs.topk(min(most, logprobs.shape[-1]), -1)) if most else ([[]] * len(wanted),) * 2
    for row, i in enumerate(wanted):
        k = requests[i].params.logprobs
        entry = {token: Logprob(value, rank + 1) for rank, (token, value) in enumerate(zip(ids[row][:k], values[row]))}
        entry.setdefault(tokens[i], Logprob(chosen[row].item(), ranks[row]))
        requests[i].logprobs.append(entry)
