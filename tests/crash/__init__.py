"""Programs that are killed on purpose, and the checker that reads what they left behind."""
