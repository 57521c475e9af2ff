"""Rollout: prompts in, sampled trajectories out; weights that change between two steps; the user's reward function."""
