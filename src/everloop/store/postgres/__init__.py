"""The store for more than one machine: one PostgreSQL database, any number of workers."""
