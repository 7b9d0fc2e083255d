"""The documented ways to run it on more than one machine."""
