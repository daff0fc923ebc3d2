"""What is trained beside or instead of the plain weights: adapters, and weights rounded as they
will be served; the options of each.
"""
