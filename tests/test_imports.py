"""Who may import whom (ARCHITECTURE.md): downwards only, and heavy packages only where they are used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = (  # top first; a module belongs to the longest prefix that fits
    ("quantkit.__main__",),
    ("quantkit.cli",),
    ("quantkit_evals",),
    ("quantkit_serve.start",),
    ("quantkit_serve.http",),
    ("quantkit_serve.split",),
    ("quantkit_serve.engine",),
    ("quantkit_serve.model", "quantkit_serve.paging"),
    ("quantkit_serve", "quantkit_serve.load"),
    ("quantkit",),
    ("quantkit.api",),
    ("quantkit.naming",),
    ("quantkit.convert", "quantkit.inspection"),
    ("quantkit.artifact",),
    ("quantkit.plan", "quantkit.calibration"),
    ("quantkit.models", "quantkit.recipe"),
    ("quantkit.checkpoint",),
    ("quantkit.safetensors_header",),
    ("quantkit.launch", "quantkit.scheme", "quantkit.units", "quantkit.data", "quantkit_recipes"),
    ("quantkit.dtypes", "quantkit.errors"),
    ("quantkit_kernels",),
)
RANK = {name: rank for rank, names in enumerate(reversed(LAYERS)) for name in names}
HEAVY = {"torch", "transformers", "huggingface_hub", "compressed_tensors", "accelerate", "safetensors", "triton"}
TORCH_TWIN = "quantkit_kernels.torch_twin"  # torch's one place among the conversions; imported when chosen
FORWARD = "quantkit_kernels.forward"  # torch tensors in and out; imported by what runs models
ENGINES = ("quantkit_evals", "quantkit_serve.model", "quantkit_serve.engine.sampler", FORWARD)
TRITON = "quantkit_kernels.forward.triton."


def modules() -> dict[str, Path]:
    found = {}
    for base in (ROOT, *(ROOT / name for name in ("kernels", "recipes", "serve", "evals"))):
        for path in base.glob("quantkit*/**/*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef)


def is_for_types(node: ast.AST) -> bool:
    """``if TYPE_CHECKING:`` runs never."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported(name: str, path: Path, known: set[str]) -> Iterator[tuple[str, bool]]:
    """(module, is at module level) of every import statement, relative ones resolved."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {id(n) for f in ast.walk(tree) if is_function(f) or is_for_types(f) for n in ast.walk(f)}
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in inner) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    filter(None, [*package.split(".")[: len(package.split(".")) - node.level + 1], base])
                )
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield (whole if whole in known else base), id(node) not in inner


def layer(name: str) -> str:
    parts = name.split(".")
    return next((p for n in range(len(parts), 0, -1) if (p := ".".join(parts[:n])) in RANK), "")


MODULES = modules()


def test_every_module_has_a_layer() -> None:
    # Only the package root may be ranked as "quantkit" itself; a new subpackage must be put into LAYERS.
    assert [n for n in MODULES if not layer(n) or (layer(n) == "quantkit" and n != "quantkit")] == []


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_downwards(name: str) -> None:
    own = layer(name)
    for target, _ in imported(name, MODULES[name], set(MODULES)):
        other = layer(target)
        if other and other != own:
            assert RANK[other] < RANK[own], f"{name} imports {target}"


@pytest.mark.parametrize("name", MODULES)
def test_heavy_packages_are_imported_where_they_are_used(name: str) -> None:
    tops = {(target.partition(".")[0], outside) for target, outside in imported(name, MODULES[name], set(MODULES))}
    assert name == "quantkit.cli.console" or "rich" not in {top for top, _ in tops}
    eager = {top for top, outside in tops if outside} & HEAVY
    assert not eager or name == TORCH_TWIN or name.startswith(ENGINES), eager
    assert "triton" not in {top for top, _ in tops} or name.startswith(TRITON)
    found = set(imported(name, MODULES[name], set(MODULES)))
    assert (TORCH_TWIN, True) not in found
    if not name.startswith(ENGINES):
        assert not [target for target, outside in found if outside and target.startswith(FORWARD)]
    if not name.startswith(TRITON[:-1]):
        assert not [target for target, outside in found if outside and target.startswith(TRITON[:-1])]


@pytest.mark.parametrize(
    "name", [n for n in MODULES if n.split(".")[1:2] == ["cli"] or n in ("quantkit", "quantkit.api")]
)
def test_the_command_line_imports_nothing_big_eagerly(name: str) -> None:
    eager = {
        target.partition(".")[0] for target, outside in imported(name, MODULES[name], set(MODULES)) if outside
    }
    assert not eager & {*HEAVY, "numpy", "pydantic", "yaml"}
