"""Texts to token ids, exactly those of the `tokenizers` library.

`word_rules.py` recognizes how a tokenizer splits words, `character_classes.py` asks the library for
its classes of characters, `native.py` makes the kernel of both, `corpus_tokenizer.py` runs it over
Arrow buffers, `certificate.py` proves a sample of what it gave, or all of it.
"""

from ridgeline.data.corpus.tokens.certificate import TokenCertificate, certified, summed
from ridgeline.data.corpus.tokens.corpus_tokenizer import CorpusTokenizer, EncodedTexts

__all__ = ["CorpusTokenizer", "EncodedTexts", "TokenCertificate", "certified", "summed"]
