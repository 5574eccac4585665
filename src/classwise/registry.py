"""Names in a study file -> code. A registry line names the module and is imported only when it is used.

Because a line is text, a rule's source fingerprint (`sources.py`) holds the one method that it runs and not its
siblings: adding an attack reruns nothing.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from classwise.errors import ConfigError, choices


class Registry(Mapping):
    """kind -> object, from lines such as `"pgd": "pgd:pgd"` (module inside `package`, colon, name)."""

    def __init__(self, package: str, noun: str, lines: dict[str, str]):
        self.package, self.noun, self._lines = package, noun, lines

    def __getitem__(self, kind: str) -> Any:
        name = self.line(kind).partition(":")[2]
        return getattr(import_module(self.module(kind)), name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __contains__(self, kind: object) -> bool:
        return kind in self._lines

    def __len__(self) -> int:
        return len(self._lines)

    def line(self, kind: str) -> str:
        if kind not in self._lines:
            raise ConfigError([f"unknown {self.noun} {kind!r}: {choices(kind, self._lines)}"])
        return self._lines[kind]

    def module(self, kind: str) -> str:
        """The dotted module that holds `kind`, without importing it."""
        return f"{self.package}.{self.line(kind).partition(':')[0]}"
