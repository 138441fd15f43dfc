"""A machine as named constants: what each is worth, in which unit, and who says so. One YAML file a machine, in `machines/`.

Two kinds. `model`: what a step takes follows from a model's shapes and these constants (step_model.py). `linear`: an engine was measured as it
stands, and a step takes what `StepCost` says.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from ..arithmetic.kernel import CARDS
from ..config import ConfigError
from .cost import StepCost

__all__ = ["CONSTANTS", "LAUNCHES", "Constant", "LinearMachine", "Machine", "machine", "machine_names"]

FOLDER = Path(__file__).with_name("machines")
LABELS = ("reported", "assumed", "fitted", "measured")
CONSTANTS = {  # of a machine of kind `model`: unit, and what it is
    "memory_share": ("of the peak", "of the card's memory bandwidth that small matrix products and sparse reads get"),
    "fp8_times": ("times", "operations on 8-bit values a second, over those on 16-bit ones"),
    "nvfp4_times": ("times", "operations on 4-bit values a second, over those on 16-bit ones"),
    "gemm_share": ("of the peak", "of the matrix units' operations that large products get"),
    "attention_share": ("of the peak", "of the 16-bit operations that sparse attention gets over many tokens"),
    "indexer_share": ("of the peak", "of the 8-bit operations that scoring keys gets, choosing the best included"),
    "token_s": ("s", "norms, rotations, routing and the rest, for each token, all layers together"),
    "launch_s": ("s", "a kernel's own time, however little it computes"),
    "near_gpus": ("GPUs", "that share a board: a group of more meets through the rack's switches"),
    "near_meeting_s": ("s", "a collective of at most near_gpus ranks, its bytes aside"),
    "far_meeting_s": ("s", "a collective of more"),
    "link_bytes_s": ("B/s", "a GPU's links, one way"),
    "exchange_share": ("of the peak", "of the links' bytes that a collective gets"),
    "wire_bytes_s": ("B/s", "a cache's bytes between engines"),
    "copy_s": ("s", "each piece of a cache that moves between engines, its bytes aside"),
    "retrieve_bytes_s": ("B/s", "a cache's bytes from the host tier"),
    "hand_over_s": ("s", "from a first token until the decoder knows of the request"),
}
LAUNCHES = ("gemm", "indexer", "attention", "rest")  # kernels of a forward that are no collective, by what they do
MAY_BE_ZERO = {"hand_over_s", "copy_s", "token_s"}


@dataclass(frozen=True)
class Constant:
    value: float
    label: str  # reported, assumed, fitted or measured
    source: str  # who says so, or which figures it was fitted to


@dataclass(frozen=True)
class Machine:
    """A machine of kind `model`; `machine["launch_s"]` is a constant's value."""

    name: str
    card: str  # a key of arithmetic.CARDS: memory bandwidth and 16-bit peak
    constants: Mapping[str, Constant]
    launches: Mapping[str, int]  # of one forward of the model that was profiled

    def __getitem__(self, name: str) -> float:
        return self.constants[name].value

    def but(self, label: str = "assumed", source: str = "changed by hand", **values: float) -> "Machine":
        """The same with other values: to ask what hangs on a constant.

        Raises:
            ConfigError: an unknown constant, or a value outside its range.
        """
        for name, value in values.items():
            _check(self.name, name, value)
        return replace(self, constants={**self.constants, **{name: Constant(value, label, source) for name, value in values.items()}})

    def mapping(self) -> dict[str, Any]:
        """As its file has it."""
        return {"kind": "model", "name": self.name, "card": self.card, "launches": dict(self.launches),
                "constants": {name: {"value": one.value, "unit": CONSTANTS[name][0], "label": one.label, "source": one.source}
                              for name, one in self.constants.items()}}


@dataclass(frozen=True)
class LinearMachine:
    """A machine of kind `linear`: prices of steps as one engine was measured, and of what moves."""

    name: str
    cost: StepCost
    others: Mapping[str, float]  # decode_attention_s, piece_s, byte_s, retrieve_byte_s, hand_over_s, as `LinearCosts` takes them
    measured: Mapping[str, Any]  # on what, when, and how well it fits


def machine_names() -> list[str]:
    """Machines that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yml"))


def machine(given: str | Path | Mapping[str, Any] | Machine | LinearMachine) -> Machine | LinearMachine:
    """A machine by name, from a file, or from a mapping of what such a file has (which needs no YAML). `this-machine` is the file that
    `minengine simulate --calibrate` has left in the working directory, if it has.

    Raises:
        ConfigError: no such machine or file, or one that lacks a constant, has an unknown one, or one outside its range.
    """
    if isinstance(given, (Machine, LinearMachine)):
        return given
    if isinstance(given, Mapping):
        return _of_mapping(given)
    path = Path(given) if Path(given).suffix in (".yml", ".yaml") else FOLDER / f"{given}.yml"
    if given == "this-machine" and Path("this-machine.yml").is_file():
        path = Path("this-machine.yml")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "is no text")
        raise ConfigError(f"machine='{given}': {why}; use {', '.join(machine_names())}, or the path of a .yml file") from error
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"machine='{given}': is no YAML ({str(error).splitlines()[0]}); see minengine/simulate/machines for examples") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"machine='{given}': holds no mapping of constants; see minengine/simulate/machines for examples")
    return _of_mapping({"name": path.stem, **found})


def _of_mapping(given: Mapping[str, Any]) -> Machine | LinearMachine:
    name, kind = str(given.get("name", "a mapping")), given.get("kind")
    if kind == "linear":
        return _linear(given, name)
    if kind != "model":
        raise ConfigError(f"machine '{name}', kind={kind!r}: use model or linear")
    if not isinstance(given.get("card"), str) or given["card"] not in CARDS:
        raise ConfigError(f"machine '{name}', card={given.get('card')!r}: use one of {', '.join(CARDS)}")
    constants = given.get("constants") or {}
    launches = given.get("launches") or {}
    for what, have, want in (("constants", constants, set(CONSTANTS)), ("launches", launches, set(LAUNCHES))):
        if not isinstance(have, Mapping):
            raise ConfigError(f"machine '{name}', {what}={have!r}: use a mapping with {', '.join(sorted(want))}")
        if set(have) != want:
            wrong = sorted(want - set(have)) or sorted(set(have) - want, key=str)
            raise ConfigError(f"machine '{name}', {what}: {wrong[0]} is {'missing' if wrong[0] in want else 'unknown'}; it has {', '.join(sorted(want))}")
    read = {}
    for key in CONSTANTS:
        one = constants[key]
        one = one if isinstance(one, Mapping) else {"value": one}
        value = _check(name, key, one.get("value"))
        label = one.get("label", "assumed")
        if label not in LABELS:
            raise ConfigError(f"machine '{name}', {key}: label={label!r}; use one of {', '.join(LABELS)}")
        read[key] = Constant(value, label, str(one.get("source", "")))
    for key in LAUNCHES:
        if not isinstance(launches[key], int) or launches[key] < 0:
            raise ConfigError(f"machine '{name}', launches: {key}={launches[key]!r}; use a whole number, 0 or more")
    return Machine(name, given["card"], read, {key: launches[key] for key in LAUNCHES})


def _check(name: str, key: str, value: Any) -> float:
    if key not in CONSTANTS:
        raise ConfigError(f"machine '{name}': {key} is unknown; use one of {', '.join(CONSTANTS)}")
    if isinstance(value, str):  # YAML reads 8e12 as a text
        try:
            value = float(value)
        except ValueError:
            pass
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value) and (value > 0 or value == 0 and key in MAY_BE_ZERO)
    if not good or key.endswith("_share") and value > 1:
        raise ConfigError(f"machine '{name}', {key}={value!r}: use a number above 0{' and at most 1' if key.endswith('_share') else ''} ({CONSTANTS[key][0]})")
    return value


def _linear(given: Mapping[str, Any], name: str) -> LinearMachine:
    prices = {field.name for field in fields(StepCost)}
    others = {"decode_attention_s", "piece_s", "byte_s", "retrieve_byte_s", "hand_over_s"}
    unknown = set(given) - prices - others - {"kind", "name", "measured"}
    if unknown:
        raise ConfigError(f"machine '{name}': {min(unknown, key=str)} is unknown; a linear machine has {', '.join(sorted(prices | others))}")
    if not isinstance(given.get("measured") or {}, Mapping):
        raise ConfigError(f"machine '{name}', measured={given['measured']!r}: use a mapping of what was measured, or leave it out")
    for key in others & set(given):
        value = given[key]
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not (isfinite(value) and value >= 0):
            raise ConfigError(f"machine '{name}', {key}={value!r}: use seconds, 0 or more")
    return LinearMachine(name, StepCost(**{key: given[key] for key in prices if key in given}), {key: float(given[key]) for key in others if key in given},
                         given.get("measured") or {})
