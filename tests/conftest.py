"""What all tests share: the import path, `--all`, and the folder of real files that some tests read when it is there."""
import os
import signal
import sys
from pathlib import Path

# Two cores and many small matrices: more threads only wait for each other. Set before torch is imported anywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")     # and where a test starts a script with more, see runs/setup.sh

import pytest

# A shell that runs this in the background lets Ctrl-C be ignored, and what ignores it hands that on to its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--all"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow; run with --all"))


@pytest.fixture(scope="session")
def shared_data():
    """Folder with real archives and vocabularies (TEARDOWN_TEST_DATA, or ../shared/data beside the checkout)."""
    folder = Path(os.environ.get("TEARDOWN_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no {folder}; set TEARDOWN_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def root():
    return ROOT
