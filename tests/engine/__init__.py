import pytest

# it contains assertions, so pytest rewrites it for readable failures
pytest.register_assert_rewrite("tests.engine.world")
