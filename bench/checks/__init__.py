"""Is it exact, are predictions right, is what is published the best: without an engine or a GPU."""
