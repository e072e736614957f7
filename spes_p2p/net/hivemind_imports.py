"""hivemind's p2p and DHT modules without the rest of it, which needs torch: two seconds and 200 MB for each peer.

`import hivemind` runs a file that imports its averagers and optimisers, of which nothing is used here. With `keep_lean`
the packages named below come without what their `__init__` would import; their modules are hivemind's own, unchanged.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_NAMES = {
    "hivemind": {},
    "hivemind.dht": {},
    "hivemind.utils": {
        "MSGPackSerializer": "hivemind.utils.serializer",
        "SerializerBase": "hivemind.utils.serializer",
        "get_logger": "hivemind.utils.logging",
        "get_dht_time": "hivemind.utils.timed_storage",
    },
}
"""Packages that stay empty, but for names that hivemind's own modules take from them, and where these come from."""


class _Loader(importlib.abc.Loader):
    def exec_module(self, module: ModuleType) -> None:
        for name, source in _NAMES[module.__name__].items():
            setattr(module, name, getattr(importlib.import_module(source), name))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        found = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname in _NAMES else None
        if found is None or found.submodule_search_locations is None:
            return None
        lean = importlib.machinery.ModuleSpec(fullname, _Loader(), origin=found.origin, is_package=True)
        lean.submodule_search_locations = found.submodule_search_locations
        return lean


def keep_lean() -> None:
    """From now on `hivemind` is imported without torch. Whatever of it was imported before stays as it is."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
