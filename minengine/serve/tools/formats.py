r"""Regular expressions for JSON Schema's formats, in what xgrammar can read; none matches a "<". They allow less than the standards in
places (years of four digits, no leap seconds, plain host names), never more but for days such as February 31."""
from __future__ import annotations

__all__ = ["FORMAT_PATTERNS"]

_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_HOURS = "([0-9]+H([0-9]+M)?([0-9]+S)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_HEX = "[0-9a-fA-F]"
_POINTER = r"(/([^~/<\n\r]|~[01])*)*"
_PATH = r"([A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9a-fA-F]{2})*"

FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": f"^P([0-9]+W|[0-9]+Y([0-9]+M)?([0-9]+D)?|[0-9]+M([0-9]+D)?|[0-9]+D|([0-9]+D)?T{_HOURS})$",
    "email": rf"^[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_HOST}$",
    "hostname": f"^{_HOST}$",
    "ipv4": rf"^{_BYTE}(\.{_BYTE}){{3}}$",
    "ipv6": f"^({_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}$",
    "uuid": f"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
    "uri": f"^[A-Za-z][A-Za-z0-9+.-]*:{_PATH}(#{_PATH})?$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
}
