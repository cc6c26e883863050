"""The wheel holds quantkit's packages and nothing else, and every file of the tree that belongs into it."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_ROOTS = {
    "quantkit": ROOT / "quantkit",
    "quantkit_kernels": ROOT / "kernels" / "quantkit_kernels",
    "quantkit_recipes": ROOT / "recipes" / "quantkit_recipes",
    "quantkit_serve": ROOT / "serve" / "quantkit_serve",
    "quantkit_evals": ROOT / "evals" / "quantkit_evals",
    "quantkit_evals/data/gates": ROOT / "evals" / "gates",
    "quantkit_evals/data/tasks": ROOT / "evals" / "tasks",
}
pytestmark = pytest.mark.packaging


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)], check=True)
    (path,) = out.glob("*.whl")
    return path


def tracked_files() -> set[str]:
    """Files under version control, as wheel paths."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    found = set()
    for line in listed:
        for package, root in PACKAGE_ROOTS.items():
            prefix = root.relative_to(ROOT).as_posix() + "/"
            if line.startswith(prefix):
                found.add(f"{package}/{line.removeprefix(prefix)}")
    return found


def test_wheel_holds_only_our_names_and_every_file(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {n.split("/")[0] for n in names}
    assert {t for t in top if not t.startswith("quantkit")} == set()
    missing = tracked_files() - set(names)
    assert missing == set()


def test_wheel_stays_small(wheel: Path) -> None:
    """Two trained models of 16.8 and 14.7 MB are most of it; more than 40 MB would mean something crept in."""
    assert wheel.stat().st_size < 40e6


def test_wheel_installs_and_converts_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "v", with_pip=False, symlinks=True)
    site = next((tmp_path / "v" / "lib").glob("python3*")) / "site-packages"
    zipfile.ZipFile(wheel).extractall(site)
    # Dependencies come from the environment that runs the tests; only quantkit must come from the wheel.
    deps = [p for p in sys.path if p.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(deps) + "\n")
    python = tmp_path / "v" / "bin" / "python"
    code = "import quantkit, quantkit_kernels as k; print(quantkit.__file__, k.describe()['name'])"
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    where = asked.stdout.split()
    assert where[0].startswith(str(site)), where
    assert where[1] == "cpu"
    done = subprocess.run(
        [python, "-m", "quantkit", "convert", "tiny-glm", "--w4", "-q", "-o", "out"], cwd=tmp_path
    )
    assert done.returncode == 0
    assert subprocess.run([python, "-m", "quantkit", "verify", "out", "-q"], cwd=tmp_path).returncode == 0
