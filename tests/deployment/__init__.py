"""The documented ways to run on more than one machine."""
