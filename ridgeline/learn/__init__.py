"""A course on making models fast: lessons that run on the reader's machine, exercises that are
checked, a glossary with this machine's figures.

A lesson is one file of `lessons/` in the percent format, prose and code; its page in docs/learn/,
its notebook and its picture are made from it (pages.py) and never edited by hand.

    ridgeline learn                          # the lessons, and how far you are
    ridgeline learn 5                        # run one here: your figures beside ours
    ridgeline learn 5 --starter mine.py      # its exercise
    ridgeline learn 5 --check mine.py        # the first case that fails
"""
