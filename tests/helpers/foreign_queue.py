"""Another program's TransferQueue in the Ray cluster, and a TransferQueue client that knows nothing but its package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch

ROW = [[1.0, 2.0, 3.0]]


class QueueProgram:
    """A program that starts TransferQueue, or joins it, and uses its own API alone."""

    def init(self, settings: dict[str, Any] | None = None) -> None:
        """Start TransferQueue with these settings; without, join the one that runs."""
        import transfer_queue as tq
        from omegaconf import OmegaConf

        tq.init(None if settings is None else OmegaConf.create(settings))

    def put(self, keys: list[str], partition: str, columns: dict[str, Any], tags: Any = None) -> None:
        """Write columns: tensors, or lists of rows of unequal lengths."""
        import transfer_queue as tq
        from tensordict import TensorDict

        fields = {
            name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) if isinstance(rows, list) else rows
            for name, rows in columns.items()
        }
        tq.kv_batch_put(keys, partition, TensorDict(fields, batch_size=[len(keys)]), tags)

    def get(self, keys: list[str], partition: str, fields: list[str]) -> dict[str, list[Any]]:
        import transfer_queue as tq

        rows = tq.kv_batch_get(keys, partition, fields)
        return {name: [row.tolist() for row in rows[name].unbind()] for name in fields}

    def fetch(self, partition: str, task: str, fields: list[str], count: int) -> dict[str, list[Any]]:
        """Claim rows with TransferQueue's own cursor."""
        import transfer_queue as tq

        client = tq.get_client()
        meta = client.get_meta(data_fields=fields, batch_size=count, partition_id=partition, task_name=task)
        rows = client.get_data(meta)
        return {name: [row.tolist() for row in rows[name].unbind()] for name in fields}

    def stream(self, partition: str, task: str, fields: list[str], count: int) -> dict[str, list[Any]]:
        """Read one batch with its streaming dataset."""
        import transfer_queue as tq
        from transfer_queue.dataloader.streaming_dataset import StreamingDataset

        controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        dataset = StreamingDataset(
            config=ray.get(controller.get_config.remote()),
            batch_size=count,
            micro_batch_size=count,
            data_fields=fields,
            partition_id=partition,
            task_name=task,
            dp_rank=0,
        )
        rows, _ = next(iter(dataset))
        dataset._tq_client.close()
        assert tq.get_client() is not dataset._tq_client
        return {name: [row.tolist() for row in rows[name].unbind()] for name in fields}

    def listed(self) -> dict[str, dict[str, Any]]:
        """Return all partitions with their keys and tags."""
        import transfer_queue as tq

        return {name: tq.kv_list().get(name, {}) for name in tq.get_client().get_partition_list()}

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        """End TransferQueue for everybody."""
        import transfer_queue as tq

        tq.close()


class Program:
    """The same in its own Ray actor."""

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        self._actor = ray.remote(QueueProgram).options(num_cpus=0).remote()
        self.init(settings)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: ray.get(getattr(self._actor, name).remote(*args), timeout=120)

    def end(self) -> None:
        ray.kill(self._actor)


SIMPLE = {
    "controller": {"polling_mode": True},
    "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 1}},
}


@contextmanager
def foreign_queue(settings: dict[str, Any] = SIMPLE) -> Iterator[Program]:
    """Another program's TransferQueue; a run that has used it must leave it as it was."""
    program = Program(settings)
    program.put(["theirs"], "their-partition", {"x": torch.tensor(ROW)}, [{"mine": 1}])
    try:
        yield program
        assert program.listed() == {"their-partition": {"theirs": {"mine": 1}}}, "a run of ours has left something"
        assert program.get(["theirs"], "their-partition", ["x"])["x"] == ROW
    finally:
        program.close()
        program.end()
