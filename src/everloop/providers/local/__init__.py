"""Models that run on this machine, in a child process: their files, the engine and the provider."""
