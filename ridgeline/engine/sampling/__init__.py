"""From logits to tokens to text: sampling on the device, grammars' masks, log-probabilities,
judging of drafts, and what a caller gets of it (`Delta`, `Output`).
"""
