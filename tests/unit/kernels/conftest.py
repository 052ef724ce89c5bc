import pytest

from rollout_engine.kernels.cpu import build


@pytest.fixture(params=["kernel", "twin"])
def side(request, monkeypatch):
    """Run with the C++ kernel, and with its eager twin."""
    if request.param == "twin":
        monkeypatch.setattr(build, "load_kernels", lambda: None)
    elif build.load_kernels() is None:
        pytest.skip("no compiler")
