"""What a climb of training says while it runs, and what it leaves."""
