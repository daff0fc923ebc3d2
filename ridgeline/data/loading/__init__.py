"""Data for training, from files to batches on a device.

`sources.py` reads files as rows, `conversations.py` finds the assistant's words in a chat,
`tokenizing.py` makes a `TokenStore` of them (`store.py`; `shards.py` keeps it on disk),
`split.py` holds a part of it out, `windows.py` cuts sequences, `order.py` says which comes when,
`packing.py` makes a batch and `loader.py` has it ready before the step wants it.

    store = read_tokens([Path("corpus.jsonl")], tokenizer).store
    data = split_data(store, sequence_length=1024, held_out=0.01, vocab_size=config.vocab_size)
    with Loader(data.train, DataState(seed=7), sequences=8, device=device) as loader:
        for batch in loader: ...                    # a PackedBatch of 8 × 1024 tokens
"""

from ridgeline.data.loading.loader import Loader, held_out_batches
from ridgeline.data.loading.order import DataState, SampleOrder
from ridgeline.data.loading.packing import IGNORED, PackedBatch
from ridgeline.data.loading.shards import open_shards, save_shards
from ridgeline.data.loading.sources import Quarantine
from ridgeline.data.loading.split import SplitData, split_data
from ridgeline.data.loading.store import TokenStore
from ridgeline.data.loading.tokenizing import TokenizedData, read_tokens
from ridgeline.data.loading.windows import TokenWindows

__all__ = [
    "IGNORED",
    "DataState",
    "Loader",
    "PackedBatch",
    "Quarantine",
    "SampleOrder",
    "SplitData",
    "TokenStore",
    "TokenWindows",
    "TokenizedData",
    "held_out_batches",
    "open_shards",
    "read_tokens",
    "save_shards",
    "split_data",
]
