import pytest

pytest.register_assert_rewrite("jdiloco.testing.conformance")
