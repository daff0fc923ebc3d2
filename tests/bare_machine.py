"""Packages of the core that a machine with nothing but torch has not: empty modules stand for them,
so that what loads random weights can be imported there. What they would do fails when it is called.

    import bare_machine                 # first
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

PACKAGES = ("tokenizers", "safetensors", "gguf", "huggingface_hub", "rich")


def byte_alphabet() -> list[str]:
    """What stands for each byte in byte-level vocabularies, which is looked at on import."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [256 + number for number in range(256 - len(printable))]
    return [chr(number) for number in (*printable, *others)]


class MissingPackage(ModuleType):
    """Every name in it is a class of nothing."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"alphabet": staticmethod(byte_alphabet)})
        setattr(self, name, made)
        return made


class MissingPackages:
    """Finds them and all that is in them."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        is_missing = name.partition(".")[0] in MISSING
        return ModuleSpec(name, MissingPackages()) if is_missing else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return MissingPackage(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """There is nothing in it."""


MISSING = {name for name in PACKAGES if find_spec(name) is None}
sys.meta_path.append(MissingPackages)  # type: ignore[arg-type]
