"""The Agent Client Protocol: the agent inside an editor."""
