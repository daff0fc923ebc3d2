"""A search: `space` (what may be chosen), `halving` (which runs go on), `surrogate` (what a run is
expected to end with), `journal` (the study on disk), `search` (the loop), `trials` and `processes`
(the runs themselves, here, in processes or on Ray).
"""
