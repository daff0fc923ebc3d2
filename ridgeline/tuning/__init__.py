"""What to train with: learning rate, batch, network shape. Rooms: `searching` (space, study,
halving, surrogate), `rates` (the range test), `scaling` (the law, transfer by width), `pages` (all
drawn); short_run.py trains in memory for them.

    ridgeline tune search demo --data book.txt --over lr=1e-5..1e-3 --steps 200 --budget 2h
"""
