"""What holds for every test: one thread per process, no downloads, nothing written to the user's own directories."""

import os
from collections.abc import Iterator

# Before numpy and torch are imported, and inherited by the processes that tests start: several of them share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
from hypothesis import settings

# A failing example is printed in a form that reruns; how long one takes says nothing on a shared machine.
settings.register_profile("spes", deadline=None, print_blob=True)
settings.load_profile("spes")


@pytest.fixture(scope="session", autouse=True)
def spes_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Point SPES_HOME at an empty directory, for this process and those it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPES_HOME", str(tmp_path_factory.mktemp("home")))
        yield
