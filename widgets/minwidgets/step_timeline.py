"""The widget Step timeline: the engine's scheduler under a virtual clock, from streams, prompt and budget to the steps.

    StepTimeline()
    StepTimeline(streams=8, prompt_tokens=2048, cost=StepCost(base_s=0.01))

Nothing here decides or counts: `answer` is what `minengine.simulate.timeline` gives. With a kernel Python asks it; on
a static page the page's host does, of the same files, run by the page's own Python. Until a reader moves a control the page
has the answers in `known`.
"""
from __future__ import annotations

from dataclasses import asdict
from typing import Any, Mapping, Sequence

import traitlets
from minengine.config import ConfigError
from minengine.simulate.answer import answer
from minengine.simulate.cost import StepCost
from minengine.simulate.timeline import LIMITS

from .modules import bundle, styles
from .page_widget import PageWidget, refuse_unknown, within

__all__ = ["StepTimeline"]

CALL = "minengine.simulate.timeline.timeline"
BUDGETS = tuple({"max_num_batched_tokens": budget} for budget in (64, 128, 256, 512))


class StepTimeline(PageWidget):
    """Steps on a time axis, the streams' tokens, and what a cold prompt costs them; simulated.

    Every trait is two-way while a kernel runs. A count outside its limits is a TraitError that names the trait.
    Settings that the scheduler refuses are refused by the constructor and by `timeline`; the page shows the same sentence.
    """

    _esm = bundle("step_timeline.js")
    _css = styles("controls.css", "step_timeline.css")

    streams = traitlets.Int(3, help="requests that are decoding when the prompt arrives").tag(sync=True)
    prompt_tokens = traitlets.Int(640, help="of the cold prompt").tag(sync=True)
    max_num_batched_tokens = traitlets.Int(128, help="the budget of a step").tag(sync=True)
    output_tokens = traitlets.Int(64, help="of each request's answer").tag(sync=True)
    seed = traitlets.Int(0, help="of the streams' own prompts and the moment of arrival").tag(sync=True)
    cost = traitlets.Dict(help="the parameters of a StepCost").tag(sync=True)
    answer = traitlets.Dict(help="{settings, value} or {settings, error}, of minengine.simulate.answer").tag(sync=True)
    known = traitlets.List(help="answers that the page has without asking, as initial and examples").tag(sync=True)
    initial = traitlets.Dict(help="what Reset goes back to: the settings as they were made").tag(sync=True)
    limits = traitlets.Dict({name: list(pair) for name, pair in LIMITS.items()}, help="least and most of each count").tag(sync=True)
    call = traitlets.Unicode(CALL, read_only=True, help="the function that answers").tag(sync=True)
    takes = traitlets.List([*LIMITS, "cost"], read_only=True, help="the traits that are its arguments").tag(sync=True)
    engine = traitlets.Unicode("", help="of a static page: whether its Python is loading, ready, or why there is none").tag(sync=True)

    def __init__(self, *, cost: StepCost | None = None, examples: Sequence[Mapping[str, int]] = BUDGETS, **settings: int) -> None:
        refuse_unknown(settings, LIMITS, ("cost", "examples"))
        super().__init__(cost=asdict(cost or StepCost()), **settings)
        self.initial = self._settings()
        self.known = [answer(CALL, {**self.initial, **example}) for example in ({}, *examples)]
        self.answer = self.known[0]
        self.timeline  # an author's mistake is an error here, not a sentence in the page
        self.observe(self._ask, list(self.takes))

    @traitlets.validate(*LIMITS)
    def _within_limits(self, proposal: Any) -> int:
        name = proposal["trait"].name
        return within(LIMITS[name], name, proposal["value"])

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.takes}

    def _ask(self, _: Any) -> None:
        self.answer = answer(CALL, self._settings())

    @property
    def timeline(self) -> dict[str, Any]:
        """What `minengine.simulate.timeline.timeline` gives for the traits as they are now.

        Raises:
            ConfigError: the scheduler refuses them.
        """
        if "error" in self.answer:
            raise ConfigError(self.answer["error"])
        return self.answer["value"]

    def _in_words(self) -> str:
        asked = f"{self.streams} streams, a prompt of {self.prompt_tokens:,} tokens, budget {self.max_num_batched_tokens:,}"
        try:
            now = self.timeline
        except ConfigError as error:
            return f"Step timeline (simulated): {asked}: {error}"
        return (f"Step timeline (simulated): {asked}: {now['stalled_gaps']} stalled gaps, the longest {1000 * now['longest_gap_s']:,.0f} ms, "
                f"{1000 * now['lost_s']:,.0f} ms lost in all; the prompt's first token after {1000 * now['ttft_s']:,.0f} ms.")
