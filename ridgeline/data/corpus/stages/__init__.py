"""What is done to each document by itself: clean, name its language, judge it, scrub it."""
