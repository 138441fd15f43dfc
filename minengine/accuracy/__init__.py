"""What a cache format costs in answers, measured through the engine's own cache, and how sure one can be of it.

    recall(llm, 1024, 128)                      # glm-mini: records of a text, found again
    needle(llm)                                 # smollm2: codes hidden in prose
    perplexity(llm), continuations(llm)         # smollm2: the next token of a public text; greedy answers
    difference(score.outcomes, plain.outcomes)  # paired, with a 95% interval in which a context counts as one
    sample_size(0.95, 0.01)                     # how many questions a difference needs
    stored()                                    # what `minengine accuracy` has measured
"""
from .agreement import agreement, continuations
from .bootstrap import Estimate, Outcomes, difference, interval
from .needle import Needle, needle
from .perplexity import perplexity
from .recall import RecallScore, recall
from .samples import Decoded, detectable, noise, questions, sample_size
from .stored import Score, Task, stored

__all__ = [
    "Decoded", "Estimate", "Needle", "Outcomes", "RecallScore", "Score", "Task", "agreement", "continuations", "detectable", "difference", "interval",
    "needle", "noise", "perplexity", "questions", "recall", "sample_size", "stored",
]
