"""What every test runs under: float64, a seeded generator that leaves no trace, --device."""

import pytest
import torch

SEED = 20180811


def pytest_addoption(parser: pytest.Parser) -> None:
    """--device: where the tests that take the `device` fixture run."""
    parser.addoption("--device", default="cpu", help="torch device of the tests (default: cpu)")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of --device; a GPU that is not there is an error, not a skip."""
    chosen = torch.device(request.config.getoption("--device"))
    torch.empty(0, device=chosen)
    return chosen


@pytest.fixture(autouse=True)
def float64():
    """Tensors are float64 unless a test says otherwise; the former default comes back."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(former)


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same global random state, and puts back what it found."""
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(SEED)
        yield
