"""Importing a library without paying for it until it is used."""

import sys
from importlib import import_module, util
from types import ModuleType


class _Deferred(ModuleType):
    """Stands in `sys.modules` for a library and makes way for it when an attribute is asked for.

    The standard library's LazyLoader does the same but, before Python 3.12, loads at the second `import` already.
    """

    def __getattr__(self, name: str):
        if name.startswith("__") and name not in ("__path__", "__version__"):
            raise AttributeError(name)  # what introspection probes every module for
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        library = import_module(self.__name__)
        self.__dict__.update(library.__dict__)
        return getattr(library, name)


def defer(name: str) -> None:
    """From now on `import name` is free; the library loads when something in it is first touched.

    Planning reads the signatures of attacks and defenses, whose modules begin with `import torch`. Those modules touch
    torch only inside functions, so a plan takes no torch; one that does touch it at its top only makes planning slower.
    """
    if name not in sys.modules and util.find_spec(name) is not None:
        sys.modules[name] = _Deferred(name)
