"""Running plans, and measuring them."""
