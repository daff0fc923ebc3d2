"""`CorpusRecipe`: how raw files become a corpus. Small frozen dataclasses, one for each part.

recipe = replace(CorpusRecipe(), language=LanguageOptions(keep=("en",)))
print(as_toml(recipe))                      # what `ridgeline data build --show` prints
load_recipe(Path("corpus/recipe.json"))     # a recipe that a build has stored; or a .toml
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from ridgeline.data.corpus.decontamination import DecontaminationOptions
from ridgeline.data.corpus.duplicates import DuplicateOptions
from ridgeline.errors import UsageError
from ridgeline.formats.fields import check_fields, config_from, field_help

FILE_NAME = "recipe.json"
VERSION = 1  # of the file's schema; raised when a field changes its meaning
MB = 1 << 20


@dataclass(frozen=True)
class ReadOptions:
    """What a document is."""

    text_field: str = field(
        default="text", metadata=field_help("field of JSON lines, column of tables, with the text")
    )
    separator: str = field(
        default="",
        metadata=field_help(
            r"what stands between documents of a plain text, e.g. \n\n or <|endoftext|>; without "
            "one a file is a document"
        ),
    )
    max_document_mb: int = field(
        default=16,
        metadata=field_help("longer documents are quarantined", minimum=1, maximum=256),
    )
    max_ratio: int = field(
        default=200,
        metadata=field_help(
            "files that unpack to more than this, times their size, too", minimum=2
        ),
    )
    unit_mb: int = field(
        default=64,
        metadata=field_help("input of one piece of work, at most", minimum=1, maximum=64),
    )

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def max_document_bytes(self) -> int:
        return self.max_document_mb * MB

    @property
    def mark(self) -> str:
        r"""The separator as it stands in a file: shells pass on \n as two letters."""
        return self.separator.replace(r"\n", "\n").replace(r"\t", "\t")

    @property
    def unit_bytes(self) -> int:
        return self.unit_mb * MB


@dataclass(frozen=True)
class CleanOptions:
    unicode: bool = field(
        default=True,
        metadata=field_help("compose characters (NFC), drop control characters, tidy spaces"),
    )
    boilerplate: bool = field(
        default=True, metadata=field_help("drop lines of menus, cookies and JavaScript notices")
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class QualityOptions:
    rules: tuple[str, ...] = field(
        default=("gopher", "c4", "fineweb"),
        metadata=field_help("families of rules: gopher, c4, fineweb, none", several=True),
    )
    min_words: int = field(
        default=50, metadata=field_help("documents with fewer words are dropped", minimum=0)
    )
    max_words: int = field(default=100_000, metadata=field_help("with more, too", minimum=1))

    def __post_init__(self) -> None:
        check_fields(self)
        unknown = set(self.rules) - {"gopher", "c4", "fineweb", "none"}
        if unknown:
            raise UsageError(
                f"rules has {sorted(unknown)[0]!r}; give some of gopher, c4, fineweb, or none"
            )
        if self.min_words > self.max_words:
            raise UsageError(f"min_words is {self.min_words}, more than max_words {self.max_words}")


@dataclass(frozen=True)
class LanguageOptions:
    identify: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata=field_help("name each document's language (auto: where its model is installed)"),
    )
    keep: tuple[str, ...] = field(
        default=(),
        metadata=field_help("languages that are kept, e.g. en de; all without", several=True),
    )
    min_score: float = field(
        default=0.5,
        metadata=field_help("least certainty of a kept language", minimum=0.0, maximum=1.0),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.keep and self.identify == "off":
            raise UsageError("keep names languages and identify is off; give identify = on")
        wrong = [name for name in self.keep if not (name.isalpha() and 2 <= len(name) <= 3)]
        if wrong:
            raise UsageError(f"keep has {wrong[0]!r}; give ISO 639 codes, e.g. en, de, ceb")


@dataclass(frozen=True)
class PiiOptions:
    emails: bool = field(default=True, metadata=field_help("replace e-mail addresses"))
    addresses: bool = field(default=True, metadata=field_help("replace public IP addresses"))
    phones: bool = field(default=True, metadata=field_help("replace telephone numbers"))
    cards: bool = field(default=True, metadata=field_help("replace numbers of payment cards"))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class TokenOptions:
    tokenizer: str = field(
        default="demo",
        metadata=field_help("the model whose tokenizer it is: folder, hub name, demo"),
    )
    certify: bool = field(
        default=False,
        metadata=field_help("compare all ids with the library's, not a hundredth of them"),
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class CorpusRecipe:
    read: ReadOptions = field(default_factory=ReadOptions)
    clean: CleanOptions = field(default_factory=CleanOptions)
    quality: QualityOptions = field(default_factory=QualityOptions)
    language: LanguageOptions = field(default_factory=LanguageOptions)
    pii: PiiOptions = field(default_factory=PiiOptions)
    duplicates: DuplicateOptions = field(default_factory=DuplicateOptions)
    evaluations: DecontaminationOptions = field(default_factory=DecontaminationOptions)
    tokens: TokenOptions = field(default_factory=TokenOptions)


def as_json(recipe: CorpusRecipe) -> str:
    return json.dumps({"version": VERSION} | asdict(recipe), indent=2) + "\n"


def as_toml(recipe: CorpusRecipe) -> str:
    """With each field's meaning beside it."""
    lines = [f"version = {VERSION}"]
    for part in fields(recipe):
        options = getattr(recipe, part.name)
        assert is_dataclass(options), part.name
        lines += ["", f"[{part.name}]"]
        for entry in fields(options):
            value = json.dumps(getattr(options, entry.name), ensure_ascii=False)
            lines.append(f"{entry.name} = {value}  # {entry.metadata['help']}")
    return "\n".join(lines) + "\n"


def load_recipe(path: Path) -> CorpusRecipe:
    """From a `.json` or `.toml`, or from the folder of a corpus. Fields left out keep defaults."""
    path = path / FILE_NAME if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
        values: Any = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not {path.suffix[1:].upper()}: {error}") from error
    return parse_recipe(values, str(path))


def parse_recipe(values: Any, origin: str) -> CorpusRecipe:
    if isinstance(values, dict):
        if values.get("version") != VERSION:
            raise UsageError(
                f"{origin} is a recipe of version {values.get('version')!r}; this Ridgeline reads "
                f"version {VERSION}"
            )
        values = {
            name: {key: tuple(v) if isinstance(v, list) else v for key, v in part.items()}
            if isinstance(part, dict)
            else part
            for name, part in values.items()
            if name != "version"
        }
    recipe: CorpusRecipe = config_from(CorpusRecipe, values, origin)
    return recipe
