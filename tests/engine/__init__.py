import pytest

pytest.register_assert_rewrite("tests.engine.world")  # it checks as the tests do, so its failures say as much
