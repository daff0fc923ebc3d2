"""The files of a Hugging Face folder that hold a tokenizer, whatever it was read from.

save_model(model, folder, source=path, extra_files=tokenizer.files())
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from ridgeline.data.vocabulary import Vocabulary


def tokenizer_files(vocabulary: Vocabulary) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json, generation_config.json and the chat templates."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.bos_id is not None
        and vocabulary.bos_id in vocabulary.prefix_ids,
        "add_eos_token": bool(vocabulary.suffix_ids),
        "clean_up_tokenization_spaces": False,
        **vocabulary.special_texts,
    }
    generation: dict[str, Any] = {"eos_token_id": list(vocabulary.eos_ids)}
    if vocabulary.bos_id is not None:
        generation["bos_token_id"] = vocabulary.bos_id
    files = {
        "tokenizer.json": with_surroundings(vocabulary).to_str(pretty=False).encode(),
        "tokenizer_config.json": as_json(config),
        "generation_config.json": as_json(generation),
    }
    if "default" in vocabulary.chat_templates:
        files["chat_template.jinja"] = vocabulary.chat_templates["default"].encode()
    return files


def with_surroundings(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """A copy of the splitter that adds BOS and EOS itself, for readers that ignore the flags."""
    copy = tokenizers.Tokenizer.from_str(vocabulary.backend.to_str())
    prefix, suffix = vocabulary.prefix_ids, vocabulary.suffix_ids
    if not prefix and not suffix:
        return copy
    names = {token_id: copy.id_to_token(token_id) for token_id in (*prefix, *suffix)}
    before = [f"{names[token_id]}:0" for token_id in prefix]
    after = [f"{names[token_id]}:0" for token_id in suffix]
    copy.post_processor = TemplateProcessing(
        single=[*before, "$A:0", *after],
        pair=[*before, "$A:0", "$B:0", *after],
        special_tokens=[(name, token_id) for token_id, name in names.items()],
    )
    return copy


def as_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
