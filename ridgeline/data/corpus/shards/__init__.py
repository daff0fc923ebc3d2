"""A corpus as training reads it: a folder of Arrow tokens, Parquet documents and an index.

tokens-00000.arrow      ids of documents one behind the other, and where each comes from; mapped
documents-00000.parquet every document of the same input, dropped ones too, and its tokens' place
index.json              sizes, hashes, vocabulary, certificate; written last

`token_files.py` has the Arrow files, `documents.py` the tables, `tasks.py` the work that makes both
out of the documents table of a unit, `index.py` the index and its checks.
"""

from ridgeline.data.corpus.shards.index import CorpusIndex, read_index, write_index
from ridgeline.data.corpus.shards.tasks import write_documents, write_tokens
from ridgeline.data.corpus.shards.token_files import TokenFile, open_token_file

__all__ = [
    "CorpusIndex",
    "TokenFile",
    "open_token_file",
    "read_index",
    "write_documents",
    "write_index",
    "write_tokens",
]
