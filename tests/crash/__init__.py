"""Programs that are killed on purpose, and the checker that verifies the state they left."""
