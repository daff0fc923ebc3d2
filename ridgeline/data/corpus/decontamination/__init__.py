"""Documents that hold questions of evaluation sets, and which: they are dropped before training.

    task, sets = evaluation_task({"hellaswag": "hellaswag_val.jsonl"})
    decontaminate(output, [table, sets], options=DecontaminationOptions())

A document is contaminated if `ngram` words in a row of it stand in a text of a set; a text of fewer
words (down to `least`) must stand there whole, and shorter ones are not looked for. Words are those
of kernels/minhash: case, punctuation and spaces do not count.
"""

from ridgeline.data.corpus.decontamination.evaluations import evaluation_task
from ridgeline.data.corpus.decontamination.finding import decontaminate
from ridgeline.data.corpus.decontamination.grams import DecontaminationOptions

__all__ = ["DecontaminationOptions", "decontaminate", "evaluation_task"]
