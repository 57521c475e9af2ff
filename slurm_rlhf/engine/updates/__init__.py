"""How an engine takes over the weights of another policy version."""
