"""Attention over pages on a CPU in torch's own products, where no C++ compiler is at hand."""
