"""Models, and the loop that trains them."""
