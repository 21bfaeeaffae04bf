import pytest

from consistency.jobs import make_checkpoint


@pytest.fixture(scope="session", params=["qwen3", "nemotron-3.5"])
def model(request, tmp_path_factory):
    """(family, checkpoint folder) of each tiny model."""
    folder = tmp_path_factory.mktemp("checkpoints") / request.param
    make_checkpoint.write(request.param, "tiny", folder)
    return request.param, folder
