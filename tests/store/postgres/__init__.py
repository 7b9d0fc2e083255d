"""A PostgreSQL server for the tests, from a package: no system service is needed."""
