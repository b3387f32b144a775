"""torch.distributed on this machine, by gloo, with 2 and with 4 processes: equal to plain `.to` on every rank."""

from __future__ import annotations

import functools
import json
import socket
from pathlib import Path

import distributed_worker
import pytest
import torch.multiprocessing
from distributed_worker import CHECKS


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@functools.cache
def results(world: int, folder: Path) -> list[dict[str, str]]:
    """The outcome of every check on every rank: processes are started once for all of them."""
    place = folder / str(world)
    place.mkdir()
    torch.multiprocessing.spawn(distributed_worker.run, (world, free_port(), str(place)), nprocs=world)
    return [json.loads((place / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_distributed(world: int, name: str, folder: Path) -> None:
    failures = {rank: result[name] for rank, result in enumerate(results(world, folder)) if result[name]}
    assert not failures, "\n".join(f"on rank {rank}:\n{failure}" for rank, failure in failures.items())
