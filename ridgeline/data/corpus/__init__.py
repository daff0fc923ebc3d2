"""Corpora: from raw files to clean, deduplicated, tokenized shards, the same bytes each time.

`recipe.py` says what is done. `units/` cuts the input into units of at most 64 MB, `sources/` reads
a unit's documents, `stages/` cleans and judges them, `duplicates/` finds what stands twice,
`tokens/` and `shards/` write what is trained on. `ledger/` runs each piece of work once, `engines/`
on processes or on Ray. `build.py` is the chain and `plan.py` what it will take.

    ridgeline data build --in 'crawl/*.warc.gz' --out corpus
"""
