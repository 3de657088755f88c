"""Let failed assertions of the contract say what they compared."""

import pytest

pytest.register_assert_rewrite("kernel_core.testing.storage")
