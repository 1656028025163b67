"""The own algorithm of docs/guides/extending.md, as a reader saves it."""

import re
import types

from tests.checkout import ROOT

GUIDE = ROOT / "docs" / "guides" / "extending.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
(OWN_METHOD,) = (block for block in BLOCKS if "class MomentumTracking" in block)


def own_method() -> types.ModuleType:
    """The file as a module."""
    module = types.ModuleType("own_method")
    exec(OWN_METHOD, vars(module))
    return module
