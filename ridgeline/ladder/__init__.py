"""Changes to a model that are measured before they are kept: `optimize` and `quantize`.

    rungs/       the changes, and where each applies: a rung is added here
    climbing/    which rung is tried next, within which budget, and what is kept
    measuring/   one recipe in its own process, measured in rounds
    quantizing/  one scheme, or the cheapest mixture inside a bound
    reporting/   what came of a climb: tables, records, the report
    modules/     the same for any `nn.Module`, with rungs of its own

Beside them: outcome.py has the words for what was measured, state.py where a climb stands.
"""
