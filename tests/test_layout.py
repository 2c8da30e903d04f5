"""The layout that one import name depends on: links, declared packages, and dependencies that point one way."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKS = {
    "numem/kernels": "../kernels",
    "dagster_project/assets": "../assets",
    "dagster_project/resources": "../resources",
}

# A room may import rooms before it in this list, and its own.
ORDER = ["numem.kernels", "numem", "dagster_project.resources", "dagster_project.assets", "dagster_project"]
DAGSTER_ROOMS = ORDER[2:]


def modules() -> list[tuple[str, Path]]:
    """Every module of the two packages by import name."""
    found = []
    for package in ("numem", "dagster_project"):
        for directory, children, files in os.walk(ROOT / package, followlinks=True):
            children[:] = [name for name in children if name != "__pycache__"]
            place = Path(directory).relative_to(ROOT)
            for name in files:
                if name.endswith(".py"):
                    parts = [*place.parts, name.removesuffix(".py")]
                    found.append((".".join(parts).removesuffix(".__init__"), Path(directory) / name))
    return sorted(found)


def room(module: str) -> str:
    """The most specific room a module stands in."""
    return next(r for r in (*ORDER[:1], *reversed(ORDER[2:4]), "numem", "dagster_project") if within(module, r))


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def imports(path: Path) -> list[tuple[str, int]]:
    """Absolute imports of a module, wherever in it they stand, type-checking ones too."""
    out = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            out += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            # `from numem.kernels import native` imports a module; `from dagster_project.assets import events` too.
            out += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return out


@pytest.mark.parametrize("link", sorted(LINKS))
def test_links_are_relative_symlinks(link: str) -> None:
    path = ROOT / link
    assert path.is_symlink(), f"{link} is not a symlink: check out again with `git config core.symlinks true`"
    assert os.readlink(path) == LINKS[link]


@pytest.mark.parametrize("directory", ["kernels", "assets", "resources"])
def test_top_level_directories_shadow_nothing(directory: str) -> None:
    """transformers PR#42004, transformers#7430: a top-level package of a common name is taken for the real one."""
    assert not (ROOT / directory / "__init__.py").exists()


def test_every_package_is_declared() -> None:
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {name if path.name == "__init__.py" else name.rpartition(".")[0] for name, path in modules()}
    assert present == declared


def test_sources_that_ship_as_data_are_declared() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "dagster.yaml" in data["dagster_project"]
    assert (ROOT / "dagster_project/dagster.yaml").is_file()


def test_dependencies_point_one_way() -> None:
    """kernels <- numem <- resources <- assets <- dagster_project; only the last three import Dagster."""
    wrong = []
    for module, path in modules():
        here = room(module)
        for name, line in imports(path):
            if name.split(".")[0] in ("dagster", "dagster_graphql", "dagster_pipes") and here not in DAGSTER_ROOMS:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {here} imports {name}")
            if name.split(".")[0] in ("numem", "dagster_project") and ORDER.index(room(name)) > ORDER.index(here):
                # The kernels raise the library's errors and hash with its digests; nothing else of it.
                if here == "numem.kernels" and within(name, "numem.errors") or within(name, "numem.identity.digest"):
                    continue
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {here} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_module_of_the_code_location_defers_annotations() -> None:
    """dagster#26837, #28342: deferred annotations break @asset, @asset_check and resources with an obscure error."""
    for module, path in modules():
        assert "__future__.annotations" not in [name for name, _ in imports(path)], (
            f"{module}: `from __future__ import annotations` breaks Dagster's decorators; write the annotations out"
        )


def test_import_numem_is_light() -> None:
    code = "import sys, numem; print([m for m in ('torch', 'lance', 'dagster', 'pyarrow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
