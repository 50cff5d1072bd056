"""The policy: a Qwen3 transformer as pure functions of a parameter pytree."""
