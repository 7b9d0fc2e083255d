"""The model that runs in the process: its weights here, its engine beside them."""
