"""Which installed distributions a set of requirements brings."""
import sysconfig
from importlib.metadata import Distribution, PackageNotFoundError, distributions
from typing import Iterable

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(requirements: Iterable[str]) -> dict[str, Distribution]:
    """Canonical name -> distribution, for the requirements that apply here and all that they require in turn."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    queue = [Requirement(line) for line in requirements]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            found[name] = _installed(name)
            wanted = map(Requirement, found[name].requires or ())
            queue += [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": extra})]
    return found


def _installed(name: str) -> Distribution:
    """In the environment itself: an imported package may have put folders of its own on `sys.path` with other versions in them, as Ray does."""
    for one in distributions(name=name, path=[sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]):
        return one
    raise PackageNotFoundError(name)
