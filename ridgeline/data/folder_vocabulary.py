"""The tokenizer of a Hugging Face folder: tokenizer.json and the small JSON files beside it.

What is read: tokenizer.json (splitting, merges, added tokens), tokenizer_config.json and
special_tokens_map.json (which tokens begin and end a text, the chat template), chat_template.jinja
(wins over the one in tokenizer_config.json), chat_templates/NAME.jinja, generation_config.json and
config.json (`eos_token_id`, one id or a list).

    vocabulary = folder_vocabulary(Path("SmolLM2-135M-Instruct"))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ridgeline.data.generation_config import end_ids_of, read_object
from ridgeline.data.vocabulary import Vocabulary, end_ids
from ridgeline.errors import ConfigError, ModelNotFoundError, UnsupportedError

_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def folder_vocabulary(folder: Path) -> Vocabulary:
    backend = _backend(folder)
    config = read_object(folder / "tokenizer_config.json")
    special_texts = _special_texts(folder, config)
    _make_special(backend, special_texts.values())
    bos_id = _id_of(backend, special_texts.get("bos_token"))
    eos_id = _id_of(backend, special_texts.get("eos_token"))
    templates = _chat_templates(folder, config)
    prefix, suffix = _surroundings(backend, config, bos_id, eos_id)
    added = backend.get_added_tokens_decoder()
    vocab_size = max([backend.get_vocab_size(), *(token_id + 1 for token_id in added)])
    named_ends = [
        *([eos_id] if eos_id is not None else []),
        *end_ids_of(folder),
    ]
    turn_ends = {
        token.content: token_id
        for token_id, token in added.items()
        if token.special and any(token.content in template for template in templates.values())
    }
    return Vocabulary(
        backend=backend,
        vocab_size=vocab_size,
        bos_id=bos_id,
        eos_ids=end_ids(named_ends, turn_ends),
        prefix_ids=prefix,
        suffix_ids=suffix,
        special_texts=special_texts,
        chat_templates=templates,
    )


def _backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        if (folder / "tokenizer.model").is_file():
            raise UnsupportedError(
                f"{folder} has tokenizer.model but no tokenizer.json; write one with transformers:"
                " AutoTokenizer.from_pretrained(d).save_pretrained(d)"
            )
        raise ModelNotFoundError(f"{folder} has no tokenizer: tokenizer.json is missing")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except (
        Exception
    ) as error:  # the library raises plain Exception, for bad JSON and unknown parts alike
        raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from error
    # Saved by training scripts into some folders: both would change ids without a word.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _special_texts(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, by name. Each is a string, or an object with its `content`."""
    texts: dict[str, str] = {}
    for source in (read_object(folder / "special_tokens_map.json"), config):
        for name in _SPECIAL_NAMES:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                texts[name] = text
    return texts


def _make_special(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    """Mark tokens named as special as such, even where tokenizer.json lists them as ordinary."""
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    missing = {text for text in texts if backend.token_to_id(text) is not None} - special
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in sorted(missing)]
    )


def _id_of(backend: tokenizers.Tokenizer, text: str | None) -> int | None:
    token_id: int | None = backend.token_to_id(text) if text is not None else None
    return token_id


def _surroundings(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], bos_id: int | None, eos_id: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What goes before and after a text: as tokenizer.json says, unless the config has a flag."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    extra = len(full) - len(bare)
    start = next((at for at in range(extra + 1) if full[at : at + len(bare)] == bare), 0)
    prefix, suffix = full[:start], full[start + len(bare) :]
    if isinstance(flag := config.get("add_bos_token"), bool) and bos_id is not None:
        prefix = [
            *([bos_id] if flag else []),
            *(token_id for token_id in prefix if token_id != bos_id),
        ]
    if isinstance(flag := config.get("add_eos_token"), bool) and eos_id is not None:
        suffix = [
            *(token_id for token_id in suffix if token_id != eos_id),
            *([eos_id] if flag else []),
        ]
    return tuple(prefix), tuple(suffix)


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    match config.get("chat_template"):
        case None:
            pass
        case str(template):
            templates["default"] = template
        case [*entries] if all(
            isinstance(e, dict) and {"name", "template"} <= set(e) for e in entries
        ):
            templates.update({str(entry["name"]): str(entry["template"]) for entry in entries})
        case other:
            raise ConfigError(
                f"{folder / 'tokenizer_config.json'} has a chat_template of type"
                f" {type(other).__name__}; expected a string or a list of named templates"
            )
    for path in sorted((folder / "chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_template(path)
    path = folder / "chat_template.jinja"
    if path.is_file():
        templates["default"] = _read_template(path)
    return templates


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from error
