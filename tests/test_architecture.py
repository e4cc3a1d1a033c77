"""The map in BUILD.md is the map in the files."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jdiloco

ROOT = Path(jdiloco.__file__).parent

BELOW = {"errors", "types", "events"}
MAY_IMPORT = {
    "errors": set(),
    "types": set(),
    "events": set(),
    "algo": {"errors", "types"},
    "protocol": BELOW,
    "store": BELOW | {"protocol"},
    "runtime": BELOW | {"algo", "protocol", "store"},
    "callbacks": BELOW,
    "nnx": BELOW | {"algo", "runtime"},
    "session": BELOW | {"algo", "protocol", "store", "runtime", "callbacks", "nnx"},
    "spmd": BELOW | {"algo", "protocol", "runtime"},
    "cli": BELOW | {"algo", "protocol", "store", "runtime", "callbacks", "nnx", "session"},
    "__main__": {"cli"},
    "testing": BELOW | {"algo", "protocol", "store", "runtime"},
}
THIRD_PARTY = {
    "errors": set(),
    "types": {"msgspec"},
    "events": set(),
    "algo": {"jax", "optax", "numpy", "jaxtyping", "ml_dtypes"},
    "protocol": {"msgspec"},
    "store": {"msgspec", "obstore"},
}
WORLD = {"time", "random", "uuid", "secrets", "threading", "socket", "queue", "subprocess", "os"}


def modules(package: str) -> list[Path]:
    folder = ROOT / package
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / f"{package}.py"]


def imported(path: Path) -> set[str]:
    """Absolute names of everything a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def siblings(package: str) -> set[str]:
    names = set().union(*(imported(path) for path in modules(package)))
    inside = {name.split(".")[1] for name in names if name.startswith("jdiloco.")}
    return inside - {package}


def outsiders(package: str) -> set[str]:
    names = set().union(*(imported(path) for path in modules(package)))
    return {name.split(".")[0] for name in names} - {"jdiloco", "__future__"}


def test_every_part_is_on_the_map():
    parts = {p.stem for p in ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert parts - {"__init__", "__pycache__"} <= MAY_IMPORT.keys()


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_point_inward(package):
    assert siblings(package) <= MAY_IMPORT[package]


@pytest.mark.parametrize("package", sorted(THIRD_PARTY))
def test_inner_layers_know_few_libraries(package):
    assert outsiders(package) - sys.stdlib_module_names <= THIRD_PARTY[package]


@pytest.mark.parametrize("package", ["algo", "protocol"])
def test_decisions_see_no_clock_no_chance_and_no_thread(package):
    assert not outsiders(package) & WORLD


def test_only_the_store_and_orbax_modules_reach_storage():
    users = {
        p.relative_to(ROOT).as_posix()
        for p in ROOT.rglob("*.py")
        if any(name.startswith("orbax") for name in imported(p))
    }
    assert users == {"runtime/checkpoints.py"}


def test_the_bucket_client_is_imported_when_a_bucket_is_opened_and_only_then():
    """It is large, and starts threads that a fork would not survive."""
    program = "import sys, jdiloco.store, jdiloco; sys.exit('obstore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    users = {
        p.relative_to(ROOT).as_posix()
        for p in ROOT.rglob("*.py")
        if any(name.startswith("obstore") for name in imported(p))
    }
    assert users == {f"store/{name}.py" for name in ("aws_files", "bucket", "clients")}


def test_time_has_one_door():
    users = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if imported(path) & {"time", "random", "uuid", "secrets"}
    }
    outside = {name for name in users if not name.startswith(("testing/", "cli/"))}
    assert outside == {"runtime/clock.py"}


def test_public_names_are_these():
    assert jdiloco.__all__ == [
        "Barrier",
        "DiLoCo",
        "JsonLines",
        "Session",
        "SharedQueue",
        "adaptive",
        "blend",
        "by_bytes",
        "carry",
        "contribution_weight",
        "diloco_outer",
        "explain_routing",
        "export",
        "fp32_master",
        "load",
        "log_events",
        "merge_deltas",
        "narrow_updates",
        "outer_nesterov",
        "overwrite",
        "path_names",
        "rda",
        "strided",
        "weighted_mean",
    ]


def test_completion_shows_public_names_alone():
    assert dir(jdiloco) == jdiloco.__all__


@pytest.mark.parametrize("name", jdiloco.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name):
    assert getattr(jdiloco, name).__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        jdiloco.nothing  # noqa: B018  (the access is the test)
