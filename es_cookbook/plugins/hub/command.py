"""Push a directory to the Hugging Face Hub: an export, or what makes a run.

    HF_TOKEN=... python -m es_cookbook hub runs/mine repo_id=me/mine
    HF_TOKEN=... python -m es_cookbook hub exported repo_id=me/mine revision=generation-50

`es_cookbook.plugins.hub.client` says what of a directory is pushed, and where to.
"""

import os
import sys
import threading
from pathlib import Path

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import UNNAMED, run_cli
from es_cookbook.common.terminal import say
from es_cookbook.plugins.hub.client import MAIN, check_repo_id, push


@chz.chz
class HubCommand:
    """Push an export or a run to the Hugging Face Hub, with the token in HF_TOKEN."""

    path: str = chz.field(doc="directory of an export or a run", metadata=UNNAMED)
    repo_id: str = chz.field(doc="repository, owner/name; created if it does not exist")
    revision: str = chz.field(default=MAIN, doc="branch; created if it does not exist")
    private: bool = chz.field(
        default=True, doc="create a private repository, and refuse to push to a public one"
    )
    timeout: float | None = chz.field(
        default=None, doc="seconds after which to give up; None: never"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_repo_id(self.repo_id)
        check_range(self, "timeout", above=0, finite=False)


def main(config: HubCommand) -> None:
    """Push, and print the address of the commit."""
    timer = threading.Timer(config.timeout or threading.TIMEOUT_MAX, _give_up, [config])
    timer.daemon = True
    timer.start()
    say(f"pushing {config.path} to {config.repo_id}")
    try:
        print(push(Path(config.path), config.repo_id, config.revision, config.private))
    finally:
        timer.cancel()


def _give_up(config: HubCommand) -> None:
    """End this process: a server that keeps a connection open is waited for inside libraries."""
    print(
        f"cannot push to {config.repo_id}: it was not done within {config.timeout:g} s",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def cli() -> None:
    run_cli(main, HubCommand)
