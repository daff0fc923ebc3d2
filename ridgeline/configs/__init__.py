"""Named runs: Python functions without arguments that return a config. Flags change single fields.

`training.py` has the runs of `ridgeline train`, `corpus.py` the recipes of `ridgeline data build`,
each also something to copy from; `named.py` finds one by its name, here or in a user's own file.

    ridgeline train configs:finetune_demo --data book.txt --steps 200
    ridgeline train my_runs.py:night --lr 2e-5
    ridgeline data build configs:web_english --in 'crawl/*.warc.gz' --out corpus
"""
