"""The conformance kit, on the kernel's own engine."""

import pytest


@pytest.mark.conformance("single")
def test_it_conforms(conformance_check):
    conformance_check()
