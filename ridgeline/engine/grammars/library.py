"""xgrammar's modules. Its package imports transformers, which takes two seconds of Python, while
the steps of an engine in the same process wait, and nothing here needs it (0.2.8). Processes of our
own, in which nobody else wants either package, load it without.

    in_own_process()                    # where it is
    library().compiler.GrammarCompiler
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

_lock = threading.Lock()
_own = threading.Event()
_loaded: list[Library] = []


class Library(NamedTuple):
    compiler: Any
    tokenizer_info: Any

    @property
    def matcher(self) -> Any:
        """It needs torch, which a process that only compiles does without."""
        return importlib.import_module("xgrammar.matcher")


def in_own_process() -> None:
    """Nobody but us imports anything here: from now on it is loaded without what it imports."""
    _own.set()


def library() -> Library:
    """Loaded by whoever needs it first."""
    with _lock:
        if not _loaded:
            with _segfaults_as_before():
                _loaded.append((_imported_lightly() if _own.is_set() else None) or _imported())
        return _loaded[0]


@contextmanager
def _segfaults_as_before() -> Iterator[None]:
    """What xgrammar is built on handles segmentation faults by a function that allocates (tvm_ffi
    0.1.15): of processes hit in malloc one in four waited for its own lock for ever, and others
    aborted. A process that is hit has to end. Python's signal module knows no handler of C's.
    """
    sigaction = getattr(ctypes.CDLL(None), "sigaction", None) if sys.platform != "win32" else None
    before = ctypes.create_string_buffer(256)  # the struct has 152 bytes at most
    known = sigaction is not None and sigaction(signal.SIGSEGV, None, before) == 0
    try:
        yield
    finally:
        if sigaction is not None and known:
            sigaction(signal.SIGSEGV, before, None)


def _imported() -> Library:
    from xgrammar import compiler, tokenizer_info

    return Library(compiler, tokenizer_info)


def _imported_lightly() -> Library | None:
    """Torch is left out too where it is not here yet. None where this version cannot be loaded so,
    and nothing of the attempt is left.
    """
    spec = importlib.util.find_spec("xgrammar")
    assert spec is not None, "it was checked that it is installed"
    package, stub = ModuleType("xgrammar"), ModuleType("transformers")
    package.__path__, package.__spec__ = list(spec.submodule_search_locations or ()), spec
    stub.PreTrainedTokenizerBase = stub.PreTrainedTokenizerFast = ModuleType  # type: ignore[attr-defined]
    replaced: dict[str, Any] = {"transformers": stub, "torch": None}
    replaced = {name: value for name, value in replaced.items() if name not in sys.modules}
    sys.modules.update(replaced, xgrammar=package)
    try:
        importlib.import_module("xgrammar.load_binding")
        return _imported()
    except Exception:
        for name in [name for name in sys.modules if name.split(".")[0] == "xgrammar"]:
            del sys.modules[name]
        return None
    finally:
        for name in replaced:
            del sys.modules[name]
