"""A model as an application of Ray Serve, on a private Ray or on a cluster that is there."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from pipeline.config.settings import ClusterSettings
from pipeline.launch.cluster import address_of, connect
from pipeline.serving.replicas import ReplicaSettings
from workers.errors import UserError
from workers.serving.bundle import Bundle

GUARD_S = 2.0  # between two looks for the server
GUARDS = "accrete-servers"  # namespace of the actors that look
# States of a replica of Ray Serve in which it answers; the latter on a node that is taken away.
ANSWERING = ("RUNNING", "PENDING_MIGRATION")
ROUTES_S = 30.0  # at most, until a handle asks no replica of the model before


class ModelHolder:
    """An actor that replicas take models from, also those that start later or again.

    A model is the body of a bundle, and the file's bytes in Ray's object store by file name.
    """

    def __init__(self) -> None:
        self.models: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}

    def add(self, digest: str, body: Mapping[str, Any], files: Mapping[str, Any]) -> None:
        """Hold one more model. files: name -> reference to uint8 (bytes,)."""
        self.models[digest] = (body, files)

    def model(self, digest: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return body and files of a model."""
        return self.models[digest]

    def keep_only(self, digest: str) -> None:
        """Drop all models but one."""
        self.models = {digest: self.models[digest]}


def held_bundle(holder: Any, digest: str) -> Bundle:
    """Return the bundle that a `ModelHolder` has; its files are read from the object store."""
    import ray  # heavy, and a replica has it loaded already

    body, files = ray.get(holder.model.remote(digest))

    def fetch(name: str) -> bytes:
        data: bytes = ray.get(files[name]).tobytes()
        return data

    return Bundle(body, fetch, "the model")


class Application:
    """One model on replicas of Ray Serve.

    ray: the module, connected. total_pixels, record_in: as for `Deployment`.
    """

    def __init__(self, ray: Any, replicas: ReplicaSettings, total_pixels: int, record_in: str = ""):
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # heavy

        self.ray = ray
        self.replicas = replicas
        self.total_pixels = total_pixels
        self.record_in = record_in
        self.name = f"accrete-{uuid.uuid4().hex[:8]}"
        self.digest = ""  # of the model that is served
        self.handle: Any = None  # of the replicas
        this_node = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        options = {"num_cpus": 0, "scheduling_strategy": this_node}
        self.holder = ray.remote(**options)(ModelHolder).remote()
        self.guard: Any = None

    def deploy(self, bundle: Bundle) -> Any:
        """Serve a bundle, and return what GET /tasks answers when all replicas have it.

        Replicas of the model before finish what they answer, and are replaced one after another by
        replicas that have loaded the new one. Raise `UserError` when the bundle cannot be loaded;
        the model before is served then.
        """
        import numpy as np  # start-up time

        digest = str(bundle.body["sha256"])
        files = {}
        for name in bundle.body["files"]:
            data = np.frombuffer(bundle.read(name), np.uint8)
            files[name] = self.ray.put(data)
        self.ray.get(self.holder.add.remote(digest, bundle.body, files))
        try:
            self.handle = self._run(digest)
        except RuntimeError as error:  # what Ray Serve raises
            if self.digest:
                self._run(self.digest)
            raise UserError(
                f"{bundle.where} cannot be served ({last_line(error)}); mend that and try again"
            ) from None
        self.digest = digest
        tasks = self._tasks_of(digest)
        self.ray.get(self.holder.keep_only.remote(digest))
        return tasks

    def _run(self, digest: str) -> Any:
        """Have Ray Serve run a model that the holder has. Return the handle when it answers."""
        from ray import serve

        from pipeline.serving.deployment import deployment_of

        model = partial(held_bundle, self.holder, digest)
        deployment = deployment_of(self.replicas)
        application = deployment.bind(
            model, self.total_pixels, self.replicas.device, self.record_in
        )
        return serve.run(application, name=self.name, route_prefix=None)

    def _tasks_of(self, digest: str) -> Any:
        """Return the tasks of a model, once the handle asks replicas of it."""
        deadline = time.monotonic() + ROUTES_S
        while True:
            tasks = self.handle.tasks.remote().result()
            if tasks["model"] == digest or time.monotonic() > deadline:
                return tasks
            time.sleep(0.1)

    def count_replicas(self) -> int:
        """Return how many replicas can answer now."""
        return count_running(self.name)

    def start_guard(self) -> None:
        """See to it that the application ends when this process is killed."""
        options = {"num_cpus": 0, "lifetime": "detached", "namespace": GUARDS, "name": self.name}
        self.guard = self.ray.remote(**options)(Guard).remote()
        self.guard.watch.remote(self.holder, self.name)

    def delete(self) -> None:
        """Leave nothing of it on the cluster."""
        from ray import serve

        serve.delete(self.name)
        if self.guard is not None:
            self.ray.kill(self.guard)


class Guard:
    """An actor that outlives the server, to delete its application when it was killed."""

    def watch(self, holder: Any, name: str) -> None:
        """Wait for the end of the holder of the model, which ends with the server."""
        import ray
        from ray import serve

        while True:
            try:
                ray.get(holder.__ray_ready__.remote())
            except ray.exceptions.RayActorError:
                break
            time.sleep(GUARD_S)
        serve.delete(name)
        ray.actor.exit_actor()


def count_running(name: str) -> int:
    """Return how many replicas of the model of an application can answer now."""
    from ray import serve  # heavy

    from pipeline.serving.deployment import Deployment

    application = serve.status().applications.get(name)
    if application is None:
        return 0
    deployment = application.deployments.get(Deployment.name)  # type: ignore[attr-defined]
    if deployment is None:
        return 0
    states: Any = deployment.replica_states
    return sum(states.get(state, 0) for state in ANSWERING)


def last_line(error: Exception) -> str:
    """Return the last line of an error's text, which names the cause in those of Ray."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()[:300]


@contextmanager
def started(
    address: str, replicas: ReplicaSettings, total_pixels: int, record_in: str = ""
) -> Iterator[Application]:
    """Inside, have an application on a cluster. Afterwards nothing of it is left there.

    address: of a cluster that is there; empty: RAY_ADDRESS if it is set, else a private Ray.
    total_pixels, record_in: as for `Deployment`.
    Raise `UserError` when the cluster cannot be used.
    """
    cluster = ClusterSettings(
        address=address,
        # With room for a replica of the next model beside each.
        workers=2 * replicas.most,
        cpus_per_worker=replicas.cpus,
    )
    is_private = address_of(cluster) == "local"
    if address_of(cluster).startswith("ray://"):
        raise UserError(
            f"the Ray cluster at {address_of(cluster)!r} is asked from outside, and a server runs "
            "on one of its nodes; start it there, for example by `ray job submit`"
        )
    # Before Ray Serve is imported: `connect` sets what Ray reads at import.
    ray = connect(cluster)
    try:
        from ray import serve
    except ImportError as error:
        ray.shutdown()
        raise UserError(f"`serve` needs Ray Serve ({error}); install ray[serve]") from None
    # Its warnings are a line for each request that a dead replica had.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    application = None
    try:
        check_gpus(ray, replicas, is_private)
        # Ray Serve's own proxy has no deadlines for heads and bodies.
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        application = Application(ray, replicas, total_pixels, record_in)
        if not is_private:
            application.start_guard()
        yield application
    finally:
        with suppress(Exception):  # an error of closing must not hide why serving ended
            if is_private:
                serve.shutdown()
            elif application is not None:
                application.delete()
        ray.shutdown()


def check_gpus(ray: Any, replicas: ReplicaSettings, is_private: bool) -> None:
    """Raise `UserError` when this machine lacks GPUs; a cluster that is there may add nodes."""
    present = ray.cluster_resources().get("GPU", 0)
    needed = replicas.gpus * replicas.least
    if is_private and needed > present:
        raise UserError(
            f"{replicas.least} replicas with --gpus {replicas.gpus:g} need {needed:g} GPUs, and "
            f"this machine has {present:g}; give fewer, or a cluster by --address"
        )
