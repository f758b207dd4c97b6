import pytest
import synthetic


@pytest.fixture(scope="module")
def quick():
    """Fewer refits behind the bands, where tests are not about their width."""
    with pytest.MonkeyPatch.context() as patch:
        synthetic.quick(patch)
        yield
