import pytest

from xrank.ranks.byte_service import SocketMessages
from xrank.ranks.store import LocalStore
from xrank.testing.workspace_contract import MessageWorkspaceContract
from xrank.workspace.nfs import NFSWorkspace
from xrank.workspace.shared_memory import SharedMemoryWorkspace


@pytest.fixture
def closing():
    """Closes what a test made: warnings about what nobody closed are errors."""
    made = []
    yield made
    for workspace in made:
        workspace.close()


class TestNFSWorkspace(MessageWorkspaceContract):
    @pytest.fixture
    def make_workspace(self, tmp_path, closing):
        def make(rank=0, world_size=2):
            closing.append(NFSWorkspace(tmp_path / "shared", rank=rank, world_size=world_size, run_id="run"))
            return closing[-1]

        return make


class TestSharedMemoryWorkspace(MessageWorkspaceContract):
    @pytest.fixture
    def make_workspace(self, closing):
        store = LocalStore()

        def make(rank=0, world_size=2):
            closing.append(SharedMemoryWorkspace(store=store, rank=rank, world_size=world_size, run_id="run"))
            return closing[-1]

        return make


class TestSocketMessages(MessageWorkspaceContract):
    @pytest.fixture
    def make_workspace(self, closing):
        def make(rank=0, world_size=2):
            closing.append(SocketMessages())
            return closing[-1]

        return make
