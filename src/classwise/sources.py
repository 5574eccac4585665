"""A fingerprint of the code that a job really uses.

Snakemake sees when a script changes, but not the modules it imports. This walks the imports of `classwise` (and of
neighbours of the script) without executing anything. Comments, docstrings and layout do not count: explaining a line
better must not retrain a hundred models. Nor do package `__init__` files, which hold registries: a method that is
added there changes no other method, and the one that a job runs is named by `modules`.
"""

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parent


def source_fingerprint(script: Path, modules: Iterable[str] = (), files: Iterable[str] = ()) -> str:
    """SHA-256 (first 16 hex digits) over the script, the named modules and everything of ours they import.

    `files` are further files inside the package, such as templates.
    """
    found, waiting = {}, [Path(script).resolve()]
    for module in modules:
        path = _path(module)
        if path is None:
            raise ModuleNotFoundError(f"{module} is named by a registry but there is no such file in {PACKAGE}")
        waiting.append(path)
    while waiting:
        path = waiting.pop()
        if path.name != "__init__.py" and path not in found:
            text, imports = _parsed(path, path.stat().st_mtime_ns)
            found[path] = text
            waiting.extend(imports)
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(f"{path.name}\n{found[path]}\n".encode())
    for file in files:
        digest.update((PACKAGE / file).read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _parsed(path: Path, changed: int) -> tuple[str, tuple[Path, ...]]:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    imports = tuple(
        target
        for node in ast.walk(tree)
        for name in _imported(node)
        if (target := _path(name) or _neighbour(path, name)) is not None
    )
    return ast.dump(_without_docstrings(tree)), imports


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _path(module: str) -> Path | None:
    """The file of a module of this package, or None for anything else."""
    first, *rest = module.split(".")
    if first != PACKAGE.name:
        return None
    base = PACKAGE.joinpath(*rest)
    for candidate in (base / "__init__.py", base.with_suffix(".py")):
        if candidate.exists():
            return candidate
    return None


def _neighbour(path: Path, module: str) -> Path | None:
    candidate = path.with_name(f"{module}.py")
    return candidate if "." not in module and PACKAGE not in path.parents and candidate.exists() else None


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return tree
