"""Exact and near duplicates of a corpus, found by tasks that any engine can run.

    steps = duplicate_tasks(tables, num_bytes, DuplicateOptions(threshold=0.8))
    for stage in steps.stages: ...                     # all tasks of a stage beside each other
    DuplicateReport.of(notes, DuplicateOptions())      # what was removed, and how sure that is

Near means that two documents' sets of shingles (five words in a row, kernels/minhash) have a
Jaccard similarity of `threshold` or more: counted, not estimated. Every document that is removed
has a survivor that is kept and is that similar to it; which one survives depends on the documents
alone.
"""

from ridgeline.data.corpus.duplicates.options import DuplicateOptions
from ridgeline.data.corpus.duplicates.report import DuplicateReport
from ridgeline.data.corpus.duplicates.tasks import DuplicateSteps, duplicate_tasks

__all__ = ["DuplicateOptions", "DuplicateReport", "DuplicateSteps", "duplicate_tasks"]
