"""One recipe in a process of its own while it is measured: rounds that take turns, the rate that is
held within a latency bound, quality, and a look at the steps.
"""
