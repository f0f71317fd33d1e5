"""Curvature of neural networks as linear operators: Hessian, GGN, Fisher, KFAC, EKFAC.

With the names of curvlinops: `KFACLinearOperator`, `EKFACLinearOperator`, `GGNLinearOperator`, ….
To compose: `curvature(EmpiricalRisk(model, loss, data), {layer: approximation})` and `GGN(risk)`.

What is behind a name is imported when the name is first used, so that scripts wait only for what
they use. The stub beside this file says what the names are; type checkers read it too.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from curvlinops_plus.version import __version__ as __version__

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
_MODULE_OF = {
    name.name: node.module
    for node in _STUB
    if isinstance(node, ast.ImportFrom)
    for name in node.names
}
_SUBMODULES = {f"{module}".split(".")[1] for module in _MODULE_OF.values()}
__all__ = next(ast.literal_eval(node.value) for node in _STUB if isinstance(node, ast.Assign))  # pyright: ignore


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"{_MODULE_OF[name]}"), name)
    elif name in _SUBMODULES:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_SUBMODULES})
