"""How the models of a server are served: by which of Triton's schedulers, and on which device."""

import dataclasses
import json
import os
import pathlib

from harness.repository import QUEUED, STORIES, add_model, add_synthetic
from harness.server import Server

# Matrix products give the same bits for any number of rows, so that a request gets what it gets alone. The cache is
# limited because several models share the memory of one GPU, and the graphs because each takes two steps at load.
ON_GPU = {
    "gpu_device_ids": 0,
    "deterministic": "true",
    "max_tokens_in_paged_kv_cache": 16384,
    "cuda_graph_cache_size": 2,
}


@dataclasses.dataclass(frozen=True)
class Deployment:
    """What the models of a server have in common, unless their own configuration says otherwise."""

    # The field of config.pbtxt that chooses Triton's scheduler, and with it the backend's driver.
    scheduler: str = ""
    # On the stand-in for a GPU. The synthetic runner has no device.
    on_gpu: bool = False

    @property
    def queued(self):
        """Whether requests wait in Triton's own queue."""
        return self.scheduler == QUEUED

    def add_model(self, repository, name, parameters=None, *, fields="", checkpoint=None):
        """`repository.add_model`, for this deployment."""
        if self.on_gpu:
            parameters = {**ON_GPU, **(parameters or {})}
            if checkpoint == STORIES:
                checkpoint = one_layer(pathlib.Path(repository).parent / "one_layer")
        return add_model(repository, name, parameters, fields=self._with_scheduler(fields), checkpoint=checkpoint)

    def add_synthetic(self, repository, name, parameters=None, *, fields=""):
        """`repository.add_synthetic`, for this deployment."""
        return add_synthetic(repository, name, parameters, fields=self._with_scheduler(fields))

    def server(self, repository, *arguments, backends=None):
        """A running server of these models."""
        environment = stand_in(pathlib.Path(repository).parent / "stand_in") if self.on_gpu else None
        return Server(repository, *arguments, backends=backends, environment=environment)

    def _with_scheduler(self, fields):
        chosen = "sequence_batching" in fields or "dynamic_batching" in fields
        return fields if chosen else f"{fields} {self.scheduler}"


DEPLOYMENTS = {
    "iterative": Deployment(),
    "queued": Deployment(QUEUED),
    "gpu": Deployment(on_gpu=True),
}


def one_layer(folder):
    """The demo model's checkpoint without its upper layers: the stand-in computes a step in a quarter of the time."""
    if not folder.exists():
        folder.mkdir()
        for file in STORIES.iterdir():
            (folder / file.name).symlink_to(file)
        config = json.loads((STORIES / "config.json").read_text())
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return folder


def stand_in(folder):
    """The environment of a server whose backend finds the stand-in for a GPU; its libraries are linked in the folder.

    Triton's own CUDA runtime looks for `libcuda.so.1` and needs more of it than the stand-in has, so that Triton would
    refuse every model. The backend looks for `libcuda.so` too.
    """
    if not folder.exists():
        folder.mkdir()
        libraries = pathlib.Path(os.environ["CUDA_STAND_IN"])
        (folder / "libcuda.so").symlink_to(libraries / "libcuda.so.1")
        for name in ("libcublasLt.so.12", "libnccl.so.2"):
            (folder / name).symlink_to(libraries / name)
    return {"LD_LIBRARY_PATH": str(folder)}
