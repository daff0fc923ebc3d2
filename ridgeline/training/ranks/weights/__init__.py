"""What a rank holds of weights and gradients, and how the parts become whole."""
