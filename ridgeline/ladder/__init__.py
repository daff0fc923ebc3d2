"""Changes to a model that are measured before they are kept: `optimize` and `quantize`.

    rungs/       the changes, and where each applies: a rung is added here
    searching/   which rung is tried next, within which budget, and what is kept
    guessing/    the answer before it is measured, and the ladder that explains it
    climbing/    the whole of it: from an order to the folder with recipe and report
    measuring/   one recipe in a process, measured in rounds
    processes/   two of them beside each other, in turns
    quantizing/  one scheme, or the cheapest mixture inside a bound
    reporting/   what came of a climb: tables, records, the report
    modules/     the same for any `nn.Module`, with rungs of its own

Beside them: outcome.py has the words for what was measured, state.py where a climb stands,
order.py what it was asked for.
"""
