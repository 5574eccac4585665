"""How a registry line of an architecture becomes keys of the study file."""

from pydantic import create_model

from classwise.parameters import Count, Parameters
from classwise.registry import Registry


class Architectures(Registry):
    """A registry whose lines also hold the keys with defaults, all of them counts, and the smallest image side."""

    def __init__(self, package: str, noun: str, lines: dict[str, tuple[str, dict[str, int], int]]):
        super().__init__(package, noun, {kind: line for kind, (line, _, _) in lines.items()})
        self._defaults = {kind: defaults for kind, (_, defaults, _) in lines.items()}
        self.smallest = {kind: side for kind, (_, _, side) in lines.items()}

    def parameters(self, kind: str) -> type[Parameters]:
        self.line(kind)
        fields = {key: (Count, default) for key, default in self._defaults[kind].items()}
        return create_model(kind, __base__=Parameters, **fields)
