"""Push a directory to the Hugging Face Hub: an export, or the files of a run.

    HF_TOKEN=... python -m es_cookbook hub runs/mine repo_id=me/mine
    HF_TOKEN=... python -m es_cookbook hub exported repo_id=me/mine revision=generation-50

`es_cookbook.plugins.hub.push` describes which files of a directory are pushed, and where to.
"""

from pathlib import Path

import chz

from es_cookbook.common.cli import UNNAMED, run_cli
from es_cookbook.common.terminal import say
from es_cookbook.plugins.hub.push import MAIN, check_repo_id, push


@chz.chz
class HubCommand:
    """Push an export or a run to the Hugging Face Hub, with the token in HF_TOKEN."""

    path: str = chz.field(doc="directory of an export or a run", metadata=UNNAMED)
    repo_id: str = chz.field(doc="repository, owner/name; created if it does not exist")
    revision: str = chz.field(default=MAIN, doc="branch; created if it does not exist")
    private: bool = chz.field(
        default=True, doc="create a private repository, and refuse to push to a public one"
    )

    @chz.validate
    def _repository(self) -> None:
        check_repo_id(self.repo_id)


def main(config: HubCommand) -> None:
    """Push, and print the address of the commit."""
    say(f"pushing {config.path} to {config.repo_id}")
    print(push(Path(config.path), config.repo_id, config.revision, config.private))


def cli() -> None:
    run_cli(main, HubCommand)
