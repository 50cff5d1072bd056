"""Trees of agents: the agent loop, launches, counterfactual branches."""
