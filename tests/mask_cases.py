"""Random schemas that a page's grammars take, and random walks through calls of them: what the tests of the token mask share."""
import json

STRINGS = ["a", "C", "b c", "x<", "é", 'q"q', "l\nn", "<", "&lt;", "back\\slash", "Ω日", "</arg", "tab\tx", "null", "1", "a/b", "\\/", "x\\", "<|im_end|>",
           "\x01", "日本語", "😀"]
NAMES = ["city", "days", "unit", "a", "b", "is_on", "é", "x y", "values", "depth"]
KINDS = ["string", "string", "integer", "number", "boolean", "null", "enum", "const", "array", "object", "anyOf", "range"]


def random_schema(draw):
    """The text of a JSON schema of a tool's parameters."""
    return json.dumps(_object(draw, 0), ensure_ascii=draw.random() < 0.5)


def _object(draw, depth):
    names = draw.sample(NAMES, draw.randint(1, 4))
    schema = {"type": "object", "properties": {name: _value(draw, depth + 1) for name in names}}
    if draw.random() < 0.7:
        schema["required"] = [name for name in names if draw.random() < 0.6]
    if draw.random() < 0.3:
        schema["additionalProperties"] = False
    return schema


def _value(draw, depth):
    kind = draw.choice(KINDS if depth < 3 else ["string", "integer", "boolean", "enum"])
    if kind == "enum":
        values = draw.sample([*STRINGS, 1, -5, True, None, 12], draw.randint(1, 4))
        typed = all(isinstance(value, str) for value in values) and draw.random() < 0.5
        return {"enum": values, **({"type": "string"} if typed else {})}
    if kind == "const":
        return {"const": draw.choice([*STRINGS, 3, False])}
    if kind == "array":
        least = draw.choice((None, 0, 1, 2))
        most = draw.choice((None, (least or 0) + draw.randint(0, 3)))
        return {"type": "array", "items": _value(draw, depth + 1), **({} if least is None else {"minItems": least}), **({} if most is None else {"maxItems": most})}
    if kind == "object":
        return _object(draw, depth + 1)
    if kind == "anyOf":
        return {"anyOf": [_value(draw, depth + 1) for _ in range(draw.randint(1, 3))]}
    if kind == "range":
        if draw.random() < 0.3:
            return {"type": "number", "minimum": draw.randint(0, 3), "maximum": draw.randint(3, 30)}
        low, high = sorted(draw.randint(-30, 2000) for _ in range(2))
        return {"type": "integer", **{name: bound for name, bound in (("minimum", low), ("maximum", high)) if draw.random() < 0.7}}
    return {"type": kind, **({"description": "what it is"} if draw.random() < 0.2 else {})}


def next_token(draw, allowed, bytes_of):
    """One of the `allowed` ids: where there are many, rather one that ends something than a word, and seldom white space."""
    solid = [id for id in allowed if bytes_of(id).strip()] or allowed
    marks = [id for id in solid if set(bytes_of(id)) & set(b'"<>[]{},:/\\')]
    return draw.choice(marks if marks and len(allowed) > 200 and draw.random() < 0.7 else solid if draw.random() < 0.9 else allowed)
