"""How loss follows size: `runs` (what finished runs say), `law` (the fit and its intervals),
`widths` (learning rates by width, with a coordinate check).
"""
