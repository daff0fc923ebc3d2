"""Other libraries on a sample of text, for corpus_speed.py: run by a Python that has them, without
Ridgeline. Prints a line of JSON: bytes and CPU seconds of each, or why it did not run.

    peers/bin/python tests/corpus_peers.py sample.jsonl tokenizer.json
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Texts = list[str]
RULES_BYTES, SIGNATURE_BYTES, TOKENIZER_BYTES = 2 << 20, 4 << 20, 16 << 20  # that each is given


def few(texts: Texts, num_bytes: int) -> Texts:
    chosen, size = [], 0
    for text in texts:
        if size >= num_bytes:
            break
        chosen.append(text)
        size += len(text.encode())
    return chosen


def tokenizers_encode(texts: Texts, tokenizer: str) -> None:
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(tokenizer)
    for text in texts:
        loaded.encode(text, add_special_tokens=False)


def datatrove_documents(texts: Texts) -> Iterator[Any]:
    from datatrove.data import Document

    for number, text in enumerate(texts):
        yield Document(text=text, id=str(number))


def datatrove_rules(texts: Texts) -> None:
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )

    filters = (
        GopherQualityFilter(), GopherRepetitionFilter(),
        C4QualityFilter(filter_no_terminal_punct=False), FineWebQualityFilter(),
    )  # fmt: skip
    for document in datatrove_documents(texts):
        for each in filters:
            each.filter(document)


def datatrove_signatures(texts: Texts) -> None:
    from datatrove.pipeline.dedup import MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig

    with tempfile.TemporaryDirectory() as folder:
        step = MinhashDedupSignature(folder, MinhashConfig(num_buckets=14, hashes_per_bucket=8))
        step.run(datatrove_documents(texts), rank=0, world_size=1)


def text_dedup_signatures(texts: Texts) -> None:
    """As text-dedup's `embed_func` has them: 5-grams by sha1, 112 permutations in numpy."""
    import numpy as np

    prime, most = np.uint64((1 << 61) - 1), np.uint64((1 << 32) - 1)
    generator = np.random.RandomState(42)
    factors = generator.randint(1, prime, 112, dtype=np.uint64)
    terms = generator.randint(0, prime, 112, dtype=np.uint64)
    for text in texts:
        words = re.split(r"\W", text.lower())
        grams = {" ".join(words[n : n + 5]).encode() for n in range(max(1, len(words) - 4))}
        hashes = [struct.unpack("<I", hashlib.sha1(gram).digest()[:4])[0] for gram in grams]
        values = np.array(hashes, np.uint64).reshape(-1, 1)
        values = (values * factors + terms) % prime & most
        np.vstack([values, np.full(112, most, np.uint64)]).min(axis=0)


def measured(work: Callable[[Texts], None], texts: Texts) -> dict[str, Any]:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            work(texts[:2])  # imports and models are not counted
            start = time.process_time()
            work(texts)
            used = time.process_time() - start
    except Exception as error:  # a package that is not there, or is broken here: said, not fatal
        return {"failed": f"{type(error).__name__}: {error}"[:200]}
    return {"bytes": sum(len(text.encode()) for text in texts), "cpu_s": used}


def main() -> None:
    lines = Path(sys.argv[1]).read_bytes().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    results = {
        "tokenizers": measured(
            lambda own: tokenizers_encode(own, sys.argv[2]), few(texts, TOKENIZER_BYTES)
        ),
        "text-dedup's signatures": measured(text_dedup_signatures, few(texts, SIGNATURE_BYTES)),
        "datatrove signatures": measured(datatrove_signatures, few(texts, SIGNATURE_BYTES)),
        "datatrove rules": measured(datatrove_rules, few(texts, RULES_BYTES)),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
