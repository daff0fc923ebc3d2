"""Triton kernels run under its interpreter here: decided before the first kernel is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import interpreter

interpreter.install()
