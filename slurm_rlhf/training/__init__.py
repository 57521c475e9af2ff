"""Policy, value model and reference on DeepSpeed: the only room that imports deepspeed, and transformers' models."""
