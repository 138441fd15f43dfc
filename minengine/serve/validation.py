"""Pydantic's errors as one sentence that names the field and the remedy."""
from __future__ import annotations

import json
from typing import Any, Sequence

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from ..request import RequestError

__all__ = ["first_error", "shown"]

SHOWN = 60  # characters of a bad value in a message
CONSIDERED = 64  # errors; a union makes a few for one value, and a hostile body as many as it has values
REMEDIES = {  # where pydantic's words are about Python, or name no remedy
    "model_attributes_type": "send a JSON object", "model_type": "send a JSON object", "dict_type": "use an object", "list_type": "use a list",
    "string_type": "use a text", "int_type": "use a whole number", "int_from_float": "use a whole number", "float_type": "use a number",
    "bool_type": "use true or false", "none_required": "leave it out",
    "too_short": "send at least {min_length}", "too_long": "send at most {max_length}", "string_too_short": "use at least {min_length} characters",
    "string_too_long": "use at most {max_length} characters", "string_pattern_mismatch": "use a text that matches {pattern}",
}

Path = tuple[str | int, ...]


def first_error(error: RequestValidationError | ValidationError) -> tuple[str, str]:
    """(dotted field, sentence) of one field at fault; the field is "body" where it is all of it.

    A union's members complain one by one: of those about the first field the deepest one counts, since the member that got
    furthest is the one that was meant, and what several ask of the same value is joined by "or".
    """
    found = [_locate(one, error) for one in error.errors()[:CONSIDERED]]
    deepest = max((path for path, _, _ in found if path[:1] == found[0][0][:1]), key=len)
    complaints = [(value, one) for path, value, one in found if path == deepest]
    param = ".".join(map(str, deepest)) or "body"
    value, one = complaints[0]
    if one["type"] == "value_error" and isinstance(cause := one.get("ctx", {}).get("error"), RequestError):
        return param, str(cause)
    if one["type"] == "missing":
        return param, f"{param}: is missing; {'add it' if deepest else 'send a JSON object'}"
    if one["type"] == "extra_forbidden":
        return param, f"{param}: is not a field that this server knows; remove it or check its spelling"
    wanted = " or ".join(dict.fromkeys(_wanted(one) for _, one in complaints))
    return param, f"{param}={shown(value)}: {wanted}"


def _locate(one: Any, error: RequestValidationError | ValidationError) -> tuple[Path, Any, Any]:
    """Where in the body it is, and the value there. Names of union members stand in pydantic's path and are left out: they are
    no keys of the body."""
    loc: Sequence[str | int] = one["loc"]
    if not isinstance(error, RequestValidationError) or loc[:1] != ("body",):
        return tuple(loc[1:] if isinstance(error, RequestValidationError) else loc), one.get("input"), one
    path: list[str | int] = []
    here: Any = error.body
    for at, part in enumerate(loc[1:], 1):
        if isinstance(here, dict) and part in here or isinstance(here, list) and isinstance(part, int) and part < len(here):
            here = here[part]
        elif one["type"] != "missing" or at < len(loc) - 1:
            continue
        path.append(part)
    return tuple(path), here, one


def _wanted(one: Any) -> str:
    """"Input should be X" as a remedy, "use X"; pydantic's other sentences as they are."""
    if one["type"] in REMEDIES:
        return REMEDIES[one["type"]].format(**one.get("ctx", {}))
    message = one["msg"].removeprefix("Value error, ")
    for start, remedy in (("Input should be less", "use a value less"), ("Input should be greater", "use a value greater"), ("Input should be ", "use ")):
        if message.startswith(start):
            return remedy + message.removeprefix(start)
    return message[:1].lower() + message[1:] + ("" if ";" in message else "; mend the value")


def shown(value: Any) -> str:
    """A value as it is named in a sentence, spelled as in JSON; large ones are not rendered whole only to be cut."""
    if isinstance(value, (dict, list)):
        return "{...}" if isinstance(value, dict) and value else f"[{len(value)} items]" if value else repr(value)
    if isinstance(value, str):
        return repr(value[:SHOWN]) + ("..." if len(value) > SHOWN else "")
    told = json.dumps(value)
    return told[:SHOWN] + ("..." if len(told) > SHOWN else "")
