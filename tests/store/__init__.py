"""What every store promises. The suite knows only the port: a new store is one more line in STORES of conftest.py."""
