"""Replicas of a run: one config for each combination of seed and class order.

A replica is an ordinary run with one seed and one class order. Its name and its keys are the same
as if it were run separately: replica `seed-1` of run `table` is the run `table-seed-1`, and
`accrete run table.yaml --set seed=1` starts the same run.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config.settings import Config, StreamSettings
from workers.errors import UserError


def make_replica_configs(config: Config) -> dict[str, Config]:
    """Return the config of each replica, with one seed and one class order, by replica name.

    The result is empty for a config without `seeds` and `orders`.
    """
    if not config.seeds and not config.orders:
        return {}
    seeds = config.seeds or (config.seed,)
    configs = {}
    for order in config.orders or ("",):
        for seed in seeds:
            name = _replica_name(config, order, seed)
            configs[name] = config.model_copy(
                update={
                    "name": f"{config.name}-{name}",
                    "seed": seed,
                    "seeds": (),
                    "orders": (),
                    "stream": _set_class_order(config.stream, order),
                }
            )
    return configs


def refuse_replicas(config: Config, where: str, needs: str) -> None:
    """Raise `UserError` if a config has replicas: `seeds` or `orders`.

    Args:
        config: The config.
        where: Path of the config, for the message.
        needs: Reason why the command needs a single replica, as a clause. Example: "`add` updates
            one model".
    """
    replicas = make_replica_configs(config)
    if not replicas:
        return
    remedies = []
    if config.seeds:
        remedies.append(f"--set seed={config.seeds[0]}")
    if config.orders:
        remedies.append("a config without `orders`")
    raise UserError(
        f"{where} is a run of {len(replicas)} replicas ({', '.join(replicas)}), and {needs}; "
        f"choose one with {' and '.join(remedies)}"
    )


def _replica_name(config: Config, order: str, seed: int) -> str:
    """Return the name of a replica: its order and seed, if the config has `orders` and `seeds`.

    Examples: `seed-1`, `order1`, `order1-seed-1`.
    """
    parts = []
    if order:
        parts.append(_order_name(config.orders, order))
    if config.seeds:
        parts.append(f"seed-{seed}")
    return "-".join(parts)


def _order_name(orders: Sequence[str], order: str) -> str:
    """Return the name of a class order: `CARD/ORDER` becomes `ORDER`, or `CARD-ORDER` if needed.

    The card is needed if two orders have the same `ORDER`. A number gets the prefix `order-`.
    """
    stems = [other.rpartition("/")[2] for other in orders]
    stem = order.rpartition("/")[2]
    name = stem if stems.count(stem) == 1 else order.replace("/", "-")
    return f"order-{name}" if name.isdigit() else name


def _set_class_order(stream: StreamSettings, order: str) -> StreamSettings:
    """Return a stream whose entries with `split` use a class order. An order "" changes nothing."""
    if not order:
        return stream
    entries = []
    for entry in stream.tasks:
        if entry.split:
            entry = entry.model_copy(update={"order": order})
        entries.append(entry)
    return stream.model_copy(update={"tasks": tuple(entries)})
