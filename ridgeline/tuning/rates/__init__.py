"""The learning-rate finder: `range_test` (losses under a rising rate, several seeds) and `verdict`
(what they say of the rate to train with).
"""
