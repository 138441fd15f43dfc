"""The widget Prefill and decode: three timelines of the same streams and the same cold prompt, by the engine's own scheduler.

    PrefillDecode()
    PrefillDecode(streams=8, prompt_tokens=2048, pd_slowdown=2.0, cost=StepCost(base_s=0.01))

Nothing here decides or counts: `answer` is what `minengine.simulate.disagg` gives. With a kernel Python asks it; on a static page
the page's host does, of the same files, run by the page's own Python. Until a reader moves a control the page has the answers in
`known`.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import traitlets
from minengine.config import ConfigError
from minengine.simulate.answer import answer
from minengine.simulate.cost import StepCost
from minengine.simulate.disagg import ADMISSIONS, AMOUNTS, COUNTS, TOKEN_BYTES

from .modules import bundle, styles
from .page_widget import PageWidget, between, refuse_unknown, within

__all__ = ["PrefillDecode"]

CALL = "minengine.simulate.disagg.prefill_decode"
EXAMPLES = tuple({"prompt_tokens": tokens, "pd_slowdown": slowdown} for tokens in (256, 1024, 4096) for slowdown in (1.0, 2.0))
SETTINGS = (*COUNTS, *AMOUNTS, "load_admission", "token_bytes")


class PrefillDecode(PageWidget):
    """Steps, streams and the prompt on one engine with large chunks, on one with small chunks, and with prefill and decode apart; simulated.

    Every trait is two-way while a kernel runs. A value outside its limits is a TraitError that names the trait.
    Settings that do not fit together are refused by the constructor and by `timelines`; the page shows the same sentence.
    """

    _esm = bundle("prefill_decode.js")
    _css = styles("controls.css", "step_timeline.css", "prefill_decode.css")

    streams = traitlets.Int(3, help="requests that are decoding when the prompt arrives").tag(sync=True)
    prompt_tokens = traitlets.Int(1024, help="of the cold prompt").tag(sync=True)
    large_budget = traitlets.Int(512, help="of a step with large chunks, and of both engines apart").tag(sync=True)
    small_budget = traitlets.Int(64, help="of a step with small chunks").tag(sync=True)
    transfer_gb_s = traitlets.Float(1.0, help="how fast the prompt's rows travel").tag(sync=True)
    pd_slowdown = traitlets.Float(1.0, help="how much longer a step takes on each of the two engines than on the one").tag(sync=True)
    load_admission = traitlets.Enum(ADMISSIONS, "event", help="whether the decoder hears of a landing at once, or looks between its steps").tag(sync=True)
    token_bytes = traitlets.Int(TOKEN_BYTES, help="of the rows of one token").tag(sync=True)
    seed = traitlets.Int(0, help="of the streams' own prompts and the moment of arrival").tag(sync=True)
    cost = traitlets.Dict(help="the parameters of a StepCost").tag(sync=True)
    answer = traitlets.Dict(help="{settings, value} or {settings, error}, of minengine.simulate.answer").tag(sync=True)
    known = traitlets.List(help="answers that the page has without asking, as initial and examples").tag(sync=True)
    initial = traitlets.Dict(help="what Reset goes back to: the settings as they were made").tag(sync=True)
    limits = traitlets.Dict({name: list(pair) for name, pair in {**COUNTS, **AMOUNTS}.items()}, read_only=True, help="least and most of each").tag(sync=True)
    call = traitlets.Unicode(CALL, read_only=True, help="the function that answers").tag(sync=True)
    takes = traitlets.List([*SETTINGS, "cost"], read_only=True, help="the traits that are its arguments").tag(sync=True)
    engine = traitlets.Unicode("", help="of a static page: whether its Python is loading, ready, or why there is none").tag(sync=True)

    def __init__(self, *, cost: StepCost | None = None, examples: Sequence[Mapping[str, Any]] = EXAMPLES, **settings: Any) -> None:
        refuse_unknown(settings, SETTINGS, ("cost", "examples"))
        super().__init__(cost=asdict(cost or StepCost()), **settings)
        self.initial = self._settings()
        self.known = [answer(CALL, {**self.initial, **example}) for example in ({}, *examples)]
        self.answer = self.known[0]
        self.timelines  # an author's mistake is an error here, not a sentence in the page
        self.observe(self._ask, list(self.takes))

    @traitlets.validate(*COUNTS)
    def _within_limits(self, proposal: Any) -> int:
        name = proposal["trait"].name
        return within(COUNTS[name], name, proposal["value"])

    @traitlets.validate(*AMOUNTS)
    def _between(self, proposal: Any) -> float:
        name = proposal["trait"].name
        return between(AMOUNTS[name], name, proposal["value"])

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.takes}

    def _ask(self, _: Any) -> None:
        self.answer = answer(CALL, self._settings())

    @property
    def timelines(self) -> dict[str, Any]:
        """What `minengine.simulate.disagg.prefill_decode` gives for the traits as they are now.

        Raises:
            ConfigError: it refuses them.
        """
        if "error" in self.answer:
            raise ConfigError(self.answer["error"])
        return self.answer["value"]

    def _in_words(self) -> str:
        asked = f"{self.streams} streams, a prompt of {self.prompt_tokens:,} tokens"
        try:
            now = self.timelines
        except ConfigError as error:
            return f"Prefill and decode (simulated): {asked}: {error}"
        names = {"large": f"one engine, budget {self.large_budget:,}", "small": f"one engine, budget {self.small_budget:,}",
                 "apart": f"apart, {self.transfer_gb_s:g} GB/s, steps {self.pd_slowdown:g} times as long"}
        told = "; ".join(f"{names[name]}: longest gap {1000 * one['longest_gap_s']:,.0f} ms, p90 {1000 * one['p90_gap_s']:,.0f} ms, first token of the "
                         f"prompt after {1000 * one['ttft_s']:,.0f} ms, its second {1000 * one['second_gap_s']:,.0f} ms later"
                         for name, one in now.items())
        return f"Prefill and decode (simulated): {asked}: {told}."
