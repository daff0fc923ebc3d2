"""From raw text to the shards that training reads."""
