"""Quantize, measure what it does to the answers, keep it or refuse: one scheme, or the cheapest
mixture inside a bound.
"""
