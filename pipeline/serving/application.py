"""Serve a model as an application of Ray Serve, on a private Ray or on an existing cluster.

`started` connects to the cluster, and `Application.deploy` serves a bundle. A private Ray is a
cluster that this process starts on its own machine, and stops at the end.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from pipeline.config.settings import ClusterSettings
from pipeline.launch.cluster import connect, get_address
from pipeline.serving.replicas import ReplicaSettings
from workers.errors import UserError
from workers.serving.bundle import Bundle

GUARD_INTERVAL_S = 2.0  # seconds between two checks of a `Guard`
GUARD_NAMESPACE = "accrete-servers"  # Ray namespace of the actors `Guard`
# States in which a replica of Ray Serve answers. PENDING_MIGRATION: its node is about to stop.
ANSWERING = ("RUNNING", "PENDING_MIGRATION")
ROUTE_TIMEOUT_S = 30.0  # seconds to wait until a handle routes requests to the new replicas


class ModelHolder:
    """An actor that provides models to replicas, including replicas that start or restart later.

    A model consists of the body of a bundle and, for each file, a reference to the file's bytes in
    Ray's object store.
    """

    def __init__(self) -> None:
        self.models: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}

    def add(self, digest: str, body: Mapping[str, Any], files: Mapping[str, Any]) -> None:
        """Add a model.

        Args:
            digest: Digest of the bundle.
            body: Content of `model.json`.
            files: File name -> reference to an array uint8 (bytes,).
        """
        self.models[digest] = (body, files)

    def model(self, digest: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return the body and the files of a model, as passed to `add`."""
        return self.models[digest]

    def keep_only(self, digest: str) -> None:
        """Drop all models except one."""
        self.models = {digest: self.models[digest]}


def open_held_bundle(holder: Any, digest: str) -> Bundle:
    """Return a bundle of a `ModelHolder`. A replica calls this to load its model.

    The files of the bundle are read from Ray's object store.

    Args:
        holder: Handle of the actor.
        digest: Digest of the bundle.
    """
    import ray  # slow to import, but replicas have loaded it already

    body, files = ray.get(holder.model.remote(digest))

    def fetch(name: str) -> bytes:
        data: bytes = ray.get(files[name]).tobytes()
        return data

    return Bundle(body, fetch, "the model")


class Application:
    """One model on replicas of Ray Serve.

    Args:
        ray: The module `ray`, connected to a cluster.
        replicas: Number and resources of the replicas.
        total_pixels: See `Deployment`.
        record_in: See `Deployment`.
    """

    def __init__(self, ray: Any, replicas: ReplicaSettings, total_pixels: int, record_in: str = ""):
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # slow

        self.ray = ray
        self.replicas = replicas
        self.total_pixels = total_pixels
        self.record_in = record_in
        self.name = f"accrete-{uuid.uuid4().hex[:8]}"
        self.digest = ""  # digest of the served model
        self.handle: Any = None  # Ray Serve's handle of the replicas
        this_node = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        options = {"num_cpus": 0, "scheduling_strategy": this_node}
        self.holder = ray.remote(**options)(ModelHolder).remote()
        self.guard: Any = None

    def deploy(self, bundle: Bundle) -> Any:
        """Serve a bundle instead of the previous model.

        New replicas load the bundle, and then replace the previous replicas step by step. A
        previous replica completes its requests before it ends. This method returns after requests
        are routed to the new replicas.

        Returns:
            The body of the answer to GET /tasks for the new model.

        Raises:
            UserError: If the bundle cannot be loaded. In this case, the previous model, if any, is
                deployed again.
        """
        import numpy as np  # slow to import

        digest = str(bundle.body["sha256"])
        files = {}
        for name in bundle.body["files"]:
            data = np.frombuffer(bundle.read(name), np.uint8)
            files[name] = self.ray.put(data)
        self.ray.get(self.holder.add.remote(digest, bundle.body, files))
        try:
            self.handle = self._run(digest)
        except RuntimeError as error:  # raised by Ray Serve
            if self.digest:
                self._run(self.digest)
            raise UserError(
                f"{bundle.where} cannot be served ({get_last_line(error)}); fix this and try again"
            ) from None
        self.digest = digest
        tasks = self._wait_for_tasks(digest)
        self.ray.get(self.holder.keep_only.remote(digest))
        return tasks

    def _run(self, digest: str) -> Any:
        """Deploy a model of the holder on Ray Serve. Return its handle as soon as it is running."""
        from ray import serve

        from pipeline.serving.deployment import build_deployment

        model = partial(open_held_bundle, self.holder, digest)
        deployment = build_deployment(self.replicas)
        application = deployment.bind(
            model, self.total_pixels, self.replicas.device, self.record_in
        )
        return serve.run(application, name=self.name, route_prefix=None)

    def _wait_for_tasks(self, digest: str) -> Any:
        """Wait until the handle routes requests to replicas of the model with this digest.

        Returns:
            The body of the answer to GET /tasks. After ROUTE_TIMEOUT_S it is the last answer, even
            if it is from another model.
        """
        deadline = time.monotonic() + ROUTE_TIMEOUT_S
        while True:
            tasks = self.handle.tasks.remote().result()
            if tasks["model"] == digest or time.monotonic() > deadline:
                return tasks
            time.sleep(0.1)

    def count_replicas(self) -> int:
        """Return the number of replicas that can answer now."""
        return count_running_replicas(self.name)

    def start_guard(self) -> None:
        """Start an actor that deletes the application if this process is killed.

        A private Ray does not need the actor, because it ends with this process.
        """
        options = {
            "num_cpus": 0,
            "lifetime": "detached",
            "namespace": GUARD_NAMESPACE,
            "name": self.name,
        }
        self.guard = self.ray.remote(**options)(Guard).remote()
        self.guard.watch.remote(self.holder, self.name)

    def delete(self) -> None:
        """Delete the application and its guard from the cluster."""
        from ray import serve

        serve.delete(self.name)
        if self.guard is not None:
            self.ray.kill(self.guard)


class Guard:
    """An actor that outlives the server and deletes its application if the server was killed."""

    def watch(self, holder: Any, name: str) -> None:
        """Delete an application after its model holder has ended. The holder ends with the server.

        Args:
            holder: Handle of the actor `ModelHolder`.
            name: Name of the application.
        """
        import ray
        from ray import serve

        while True:
            try:
                ray.get(holder.__ray_ready__.remote())
            except ray.exceptions.RayActorError:
                break
            time.sleep(GUARD_INTERVAL_S)
        serve.delete(name)
        ray.actor.exit_actor()


def count_running_replicas(name: str) -> int:
    """Return the number of replicas of an application's model that can answer now."""
    from ray import serve  # slow to import

    from pipeline.serving.deployment import Deployment

    application = serve.status().applications.get(name)
    if application is None:
        return 0
    deployment = application.deployments.get(Deployment.name)  # type: ignore[attr-defined]
    if deployment is None:
        return 0
    states: Any = deployment.replica_states
    return sum(states.get(state, 0) for state in ANSWERING)


def get_last_line(error: Exception) -> str:
    """Return the last line of an error's message, in which Ray states the cause."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()[:300]


@contextmanager
def started(
    address: str, replicas: ReplicaSettings, total_pixels: int, record_in: str = ""
) -> Iterator[Application]:
    """Context manager that connects to a cluster, and deletes the application at the end.

    Args:
        address: Address of an existing cluster; "": RAY_ADDRESS if it is set, else a private Ray.
        replicas: Number and resources of the replicas.
        total_pixels: See `Deployment`.
        record_in: See `Deployment`.

    Yields:
        The application, without a model.

    Raises:
        UserError: If the cluster cannot be used.
    """
    cluster = ClusterSettings(
        address=address,
        # During an update, each replica may run next to a replica of the new model.
        workers=2 * replicas.maximum,
        cpus_per_worker=replicas.cpus,
    )
    is_private = get_address(cluster) == "local"
    if get_address(cluster).startswith("ray://"):
        raise UserError(
            f"{get_address(cluster)!r} is an address for Ray Client, but the server must run on a "
            "node of the cluster; start it there, for example with `ray job submit`"
        )
    # Before the import of Ray Serve: `connect` sets environment variables that Ray reads at import.
    ray = connect(cluster)
    try:
        from ray import serve
    except ImportError as error:
        ray.shutdown()
        raise UserError(f"`serve` needs Ray Serve ({error}); install ray[serve]") from None
    # At its default level, Ray Serve warns about each request to a dead replica.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    application = None
    try:
        check_replica_gpus(ray, replicas, is_private)
        # Ray Serve's own proxy is not used: it has no deadlines for heads and bodies of requests.
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        application = Application(ray, replicas, total_pixels, record_in)
        if not is_private:
            application.start_guard()
        yield application
    finally:
        with suppress(Exception):  # an error while closing must not hide the first error
            if is_private:
                serve.shutdown()
            elif application is not None:
                application.delete()
        ray.shutdown()


def check_replica_gpus(ray: Any, replicas: ReplicaSettings, is_private: bool) -> None:
    """Raise `UserError` if a private Ray has too few GPUs.

    Other clusters are not checked, because they may add nodes.

    Args:
        ray: The module `ray`, connected to a cluster.
        replicas: Number and resources of the replicas.
        is_private: Whether the cluster is a private Ray of this machine.
    """
    present = ray.cluster_resources().get("GPU", 0)
    needed = replicas.gpus * replicas.minimum
    if is_private and needed > present:
        raise UserError(
            f"{replicas.minimum} replicas with --gpus {replicas.gpus:g} need {needed:g} GPUs, and "
            f"this machine has {present:g}; request fewer, or use a cluster with --address"
        )
