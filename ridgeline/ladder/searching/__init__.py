"""What a climb decides: which change is tried next, what is kept, within a budget."""
