"""One recipe in a process of its own while it is measured: rounds that take turns, traffic at its
own pace, quality, and a look at the steps.
"""
