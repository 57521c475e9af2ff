"""Where rewards come from: a user's function, or the reward role."""
