"""What a user of the wheel meets, in an environment with nothing but its dependencies.

    .package/user/bin/python -I tests/installed.py        # `make package` does this

All files that are read at run time are there, the demo runs, and what needs an extra says so with a
command that is true.
"""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import ridgeline

PACKAGE = Path(ridgeline.__file__).parent
COMMAND = [sys.executable, "-I", "-m", "ridgeline"]
FILES = [
    "py.typed",
    "kernels/lanes.h",
    "kernels/rms_norm/cpu.cpp",
    "kernels/skinny_linear/cuda.cu",
    "kernels/choices/*.json",
    "server/page/index.html",
    "server/page/main.js",
    "server/page/chat/chat.js",
    "server/page/live/charts.js",
    "profiling/drawing/*.css",
]


def main() -> None:
    assert "site-packages" in PACKAGE.parts, f"{PACKAGE} is a checkout, not what was installed"
    assert ridgeline.__version__ == importlib.metadata.version("ridgeline")
    missing = [pattern for pattern in FILES if not list(PACKAGE.glob(pattern))]
    assert not missing, f"not in the wheel: {', '.join(missing)}"
    said = run("generate", "demo", "Why is the sky blue?", "--max-tokens", "8")
    assert said.returncode == 0, said.stderr
    print(said.stdout, said.stderr)
    check_hint(run("serve", "demo"), "serve")
    check_grammar_hint()


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=600)


def check_hint(ended: subprocess.CompletedProcess[str], extra: str) -> None:
    """One line that names the extra, and the exit code for a missing package."""
    assert ended.returncode == ridgeline.MissingPackageError.exit_code, ended.stderr
    check_extra(ended.stderr, extra)


def check_grammar_hint() -> None:
    engine = ridgeline.Engine("demo")
    sampling = ridgeline.Sampling(max_tokens=4, grammar=ridgeline.Grammar.choice(["yes", "no"]))
    try:
        engine.generate("Is water wet?", sampling)
    except ridgeline.MissingPackageError as error:
        check_extra(str(error), "grammar")
    else:
        raise AssertionError("a grammar ran without the package that follows it")


def check_extra(text: str, extra: str) -> None:
    named = re.findall(r"pip install 'ridgeline\[([a-z]+)\]'", text)
    assert named == [extra], text
    extras = importlib.metadata.metadata("ridgeline").get_all("Provides-Extra") or []
    assert extra in extras, f"{extra} is none of {', '.join(extras)}"


if __name__ == "__main__":
    main()
