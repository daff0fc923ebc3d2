"""The names that `import ridgeline` offers: all of them there, typed, and none bringing torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ridgeline

ROOT = Path(__file__).parents[2]
SOURCE = Path(ridgeline.__file__)


def names_for_type_checkers() -> set[str]:
    """What the `if TYPE_CHECKING:` block of the package imports."""
    blocks = [node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.If)]
    imports = [line for line in blocks[0].body if isinstance(line, ast.ImportFrom)]
    return {alias.name for line in imports for alias in line.names}


@pytest.mark.smoke
def test_type_checkers_see_the_names_that_are_loaded_on_first_use() -> None:
    assert names_for_type_checkers() == set(ridgeline._MODULE_OF)


@pytest.mark.smoke
def test_importing_brings_no_torch() -> None:
    code = "import sys, ridgeline; ridgeline.UsageError; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_public_name_is_there() -> None:
    assert set(ridgeline._MODULE_OF) < set(ridgeline.__all__) == set(dir(ridgeline))
    assert all(getattr(ridgeline, name) is not None for name in ridgeline.__all__)


def test_every_error_is_public() -> None:
    errors = {
        name
        for name, value in vars(ridgeline.errors).items()
        if isinstance(value, type) and issubclass(value, ridgeline.RidgelineError)
    }
    assert errors <= set(ridgeline.__all__)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("Engin", "Engine"), ("Sampler", "Sampling")],
)
def test_an_unknown_name_is_answered_with_the_near_one(wrong: str, near: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{wrong}'; did you mean '{near}'"):
        getattr(ridgeline, wrong)


def test_a_type_checker_sees_a_users_mistakes(tmp_path: Path) -> None:
    """Quick where `make lint` has run before: both read the same cache."""
    script = tmp_path / "script.py"
    script.write_text('import ridgeline\n\nridgeline.Engine("demo").nope\n')
    mypy = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(script)]
    ended = subprocess.run(mypy, cwd=ROOT, capture_output=True, text=True)
    assert '"Engine" has no attribute "nope"' in ended.stdout, ended.stdout + ended.stderr
