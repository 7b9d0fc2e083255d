"""A PostgreSQL server for the tests, out of a package: no service of the system is needed."""
